"""OLMo-2 and OLMo-3: norms behind attention and MLP, and none before. MiniMax-M2 has their attention alone.

In both, q and k have one norm over all heads, and not one for each head.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.reference.decoder import DecoderAttention, DecoderForCausalLM, DecoderLayer
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.decoder_modules import norm_over_ranks


class WideNormAttention(DecoderAttention):
    # --8<-- [start:wide-norm]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        layer = self.layer
        assert self.q_norm is not None
        assert self.k_norm is not None
        q = norm_over_ranks(self.q_norm, self.q_proj(x), self.tp).view(-1, layer.num_qo_heads, layer.head_dim)
        k = norm_over_ranks(self.k_norm, self.k_proj(x), self.tp).view(-1, layer.num_kv_heads, layer.head_dim)
        v = self.v_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        q, k = self.rotary_emb(positions, q, k)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        output = attention.backend.run(q, layer, attention.plan, k=k, v=v)
        return self.o_proj(output.flatten(1))
        # --8<-- [end:wide-norm]


class OlmoDecoderLayer(DecoderLayer):
    attention_class: Any = WideNormAttention

    # --8<-- [start:norms-after]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        heads = self.tp.all_reduce(self.self_attn(x, positions, attention))
        x = x + self.post_self_attn_layernorm(heads)
        return x + self.post_feedforward_layernorm(self.tp.all_reduce(self.mlp(x)))
        # --8<-- [end:norms-after]


class OlmoForCausalLM(DecoderForCausalLM):
    layer_class = OlmoDecoderLayer


class MiniMaxDecoderLayer(DecoderLayer):
    attention_class: Any = WideNormAttention


class MiniMaxForCausalLM(DecoderForCausalLM):
    layer_class = MiniMaxDecoderLayer
