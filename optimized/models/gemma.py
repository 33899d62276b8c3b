"""Gemma-2 and Gemma-3 (text): four norms a layer, a scaled embedding, soft-capped logits. GLM-4: four norms.

The rest is the decoder with options of ModelConfig: norms that multiply by 1 + weight, GELU, windows in
most layers, a soft-cap on attention's scores (Gemma-2), norms on the heads of q and k, and a separate RoPE
for the layers with a window (Gemma-3).

Differs from reference: as decoder.py does, but a norm stands between each GEMM that ends a block and the
residual stream, so these GEMMs do not add. Norms are kernels of their own: no GEMM includes one.
"""

from __future__ import annotations

import torch

from diptych.optimized.decoder import DecoderForCausalLM, DecoderLayer
from diptych.optimized.layers import add_and_norm
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.decoder_modules import GemmaEnds
from diptych.shared.modeling.stream import Stream


class GemmaDecoderLayer(DecoderLayer):
    """Attention and MLP each have a norm before and after."""

    def forward(self, x: Stream, positions: torch.Tensor, attention: BatchAttention) -> Stream:
        # --8<-- [start:four-norms]
        normed, residual = add_and_norm(self.input_layernorm, x)
        heads = self.self_attn(self.self_attn.qkv_proj(normed), positions, attention)
        if self.is_last and attention.rows is not None:
            residual, heads = residual[attention.rows], heads[attention.rows]
        added = self.post_self_attn_layernorm(self.tp.all_reduce(self.self_attn.o_proj(heads)))
        normed, residual = self.pre_feedforward_layernorm.add_and_norm(added, residual)
        added = self.feed_forward(residual, normed)
        return Stream(residual, self.post_feedforward_layernorm(added))
        # --8<-- [end:four-norms]

    def feed_forward(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """x: the residual stream."""
        return self.tp.all_reduce(self.mlp(normed))


class GemmaForCausalLM(GemmaEnds, DecoderForCausalLM):
    layer_class = GemmaDecoderLayer


class Glm4ForCausalLM(DecoderForCausalLM):
    """GLM-4 has the four norms, and the ends of the decoder."""

    layer_class = GemmaDecoderLayer
