"""Multi-head latent attention (MLA) of DeepSeek-V2, V3 and Kimi-Linear, in place of a decoder's attention.

Differs from reference: the two matrices that multiply the hidden states are one (qkv_proj, as in other
decoders), and o_proj is left to the decoder layer, which adds its result to the residual stream. One kernel
norms the latent vector, rotates, and writes the pool's rows.
"""

from __future__ import annotations

import torch

from diptych.optimized.kernels.attention.mla_rope_store import mla_rope_store
from diptych.optimized.layers import Linear, MergedLinear, RMSNorm, RotaryEmbedding, is_builtin_layer
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces import layers as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers
from diptych.shared.modeling.mla import MLAModules


class MLAAttention(MLAModules):
    linear_class = Linear

    def __init__(
        self, config: ModelConfig, layer_id: int, layers: Layers, rotary_emb: interface.RotaryEmbedding
    ) -> None:
        super().__init__(config, layer_id, layers, rotary_emb)
        mla, q_size = self.mla, self.layer.num_qo_heads * config.head_dim
        self.q_b_proj: Linear | None = None
        if mla.q_lora_rank is None:
            first = {"q_proj": q_size}
        else:
            first = {"q_a_proj": mla.q_lora_rank}
            self.q_a_layernorm = layers.RMSNorm(mla.q_lora_rank, mla.norm_eps)
            self.q_b_proj = Linear(mla.q_lora_rank, q_size)
        parts = {**first, "kv_a_proj_with_mqa": mla.row_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.qkv_bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """x: from qkv_proj -> for o_proj, [num_tokens, num_qo_heads * v_head_dim]."""
        layer, mla = self.layer, self.mla
        q, kv_a = self.qkv_proj.split(x).values()
        if self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q.contiguous()))
        q = q.unflatten(-1, (layer.num_qo_heads, layer.head_dim))
        rotary_emb, norm = self.rotary_emb, self.kv_a_layernorm
        if is_builtin_layer(rotary_emb, RotaryEmbedding) and is_builtin_layer(norm, RMSNorm):
            mla_rope_store(
                q,
                kv_a,
                positions,
                rotary_emb.cos_sin(positions.device),
                norm.weight,
                norm.eps,
                attention.kv_pool.k_buffer(layer.layer_id),
                attention.out_cache_loc,
                rotary_emb.rope.is_interleaved,
                attention.kv_pool.kv_scales[layer.layer_id].k,
            )
            return attention.backend.run(q, layer, attention.plan).flatten(1)
        q_nope, q_rope = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        c, k_rope = kv_a.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        k_rope = k_rope.unsqueeze(1)
        if rotary_emb is not None:
            q_rope, k_rope = rotary_emb(positions, q_rope, k_rope)
            q = torch.cat((q_nope, q_rope), dim=-1)
        row = torch.cat((norm(c.contiguous()).unsqueeze(1), k_rope), dim=-1)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, row, row)
        return attention.backend.run(q, layer, attention.plan, k=row).flatten(1)
