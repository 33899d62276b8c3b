"""OLMo-2 and OLMo-3: norms behind attention and MLP, and none before. MiniMax-M2 has their attention alone.

In both, q and k have one norm over all heads, and not one for each head.

Differs from reference: as decoder.py does. The mean squares of q and k are a kernel of their own, and a norm
behind attention or MLP is one with the sum that follows.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.decoder import DecoderAttention, DecoderForCausalLM, DecoderLayer
from diptych.optimized.kernels.attention.qk_norm_rope_store import mean_squares
from diptych.optimized.layers import RotaryEmbedding, is_builtin_layer, is_builtin_norm, norm_and_add
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.decoder_modules import norm_over_ranks
from diptych.shared.modeling.stream import Stream


class WideNormAttention(DecoderAttention):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """Compute what DecoderAttention does: x is from qkv_proj, the result for o_proj."""
        layer, rotary_emb = self.layer, self.rotary_emb
        q_norm: Any = self.q_norm
        k_norm: Any = self.k_norm
        has_own_norms = is_builtin_norm(q_norm) and is_builtin_norm(k_norm)
        # --8<-- [start:wide-norm]
        if is_builtin_layer(rotary_emb, RotaryEmbedding) and rotary_emb.can_store and has_own_norms:
            sizes = len(q_norm.weight), len(k_norm.weight)
            means = self.tp.all_reduce(mean_squares(x, *sizes, self.tp.size))
            q = rotary_emb.rotate_and_store(x, positions, q_norm, k_norm, attention, layer, means)
            return attention.backend.run(q, layer, attention.plan).flatten(1)
        q, k, v = self.qkv_proj.split(x).values()
        q, k = norm_over_ranks(q_norm, q, self.tp), norm_over_ranks(k_norm, k, self.tp)
        q, k, v = (heads.unflatten(1, (-1, layer.head_dim)) for heads in (q, k, v))
        q, k = rotary_emb(positions, q, k)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        return attention.backend.run(q, layer, attention.plan, k=k, v=v).flatten(1)
        # --8<-- [end:wide-norm]


class OlmoDecoderLayer(DecoderLayer):
    attention_class: Any = WideNormAttention

    def forward(self, x: Stream, positions: torch.Tensor, attention: BatchAttention) -> Stream:
        # --8<-- [start:norms-after]
        residual = x.residual
        heads = self.self_attn(self.self_attn.qkv_proj(residual), positions, attention)
        if self.is_last and attention.rows is not None:
            residual, heads = residual[attention.rows], heads[attention.rows]
        added = self.tp.all_reduce(self.self_attn.o_proj(heads))
        residual = norm_and_add(self.post_self_attn_layernorm, added, residual)
        added = self.tp.all_reduce(self.mlp(residual))
        return Stream(norm_and_add(self.post_feedforward_layernorm, added, residual))
        # --8<-- [end:norms-after]


class OlmoForCausalLM(DecoderForCausalLM):
    layer_class = OlmoDecoderLayer


class MiniMaxDecoderLayer(DecoderLayer):
    attention_class: Any = WideNormAttention


class MiniMaxForCausalLM(DecoderForCausalLM):
    layer_class = MiniMaxDecoderLayer
