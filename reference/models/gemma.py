"""Gemma-2 and Gemma-3 (text): four norms a layer, a scaled embedding, soft-capped logits. GLM-4: four norms.

The rest is the decoder with options of ModelConfig: norms that multiply by 1 + weight, GELU, windows in
most layers, a soft-cap on attention's scores (Gemma-2), norms on the heads of q and k, and a separate RoPE
for the layers with a window (Gemma-3).
"""

from __future__ import annotations

import torch

from diptych.reference.decoder import DecoderForCausalLM, DecoderLayer
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.decoder_modules import GemmaEnds


class GemmaDecoderLayer(DecoderLayer):
    """Attention and MLP each have a norm before and after."""

    # --8<-- [start:four-norms]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        heads = self.tp.all_reduce(self.self_attn(self.input_layernorm(x), positions, attention))
        x = x + self.post_self_attn_layernorm(heads)
        hidden = self.feed_forward(x, self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(hidden)
        # --8<-- [end:four-norms]

    def feed_forward(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """x: the residual stream."""
        return self.tp.all_reduce(self.mlp(normed))


class GemmaForCausalLM(GemmaEnds, DecoderForCausalLM):
    layer_class = GemmaDecoderLayer


class Glm4ForCausalLM(DecoderForCausalLM):
    """GLM-4 has the four norms, and the ends of the decoder."""

    layer_class = GemmaDecoderLayer
