"""Multi-head latent attention (MLA) of DeepSeek-V2, V3 and Kimi-Linear, in place of a decoder's attention."""

from __future__ import annotations

import torch

from diptych.reference.layers import Linear
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers, RotaryEmbedding
from diptych.shared.modeling.mla import MLAModules


class MLAAttention(MLAModules):
    linear_class = Linear

    def __init__(
        self, config: ModelConfig, layer_id: int, layers: Layers, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__(config, layer_id, layers, rotary_emb)
        mla, q_size = self.mla, self.layer.num_qo_heads * config.head_dim
        self.q_proj: Linear | None = None
        if mla.q_lora_rank is None:
            self.q_proj = Linear(config.hidden_size, q_size)
        else:
            self.q_a_proj = Linear(config.hidden_size, mla.q_lora_rank, config.qkv_bias)
            self.q_a_layernorm = layers.RMSNorm(mla.q_lora_rank, mla.norm_eps)
            self.q_b_proj = Linear(mla.q_lora_rank, q_size)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, mla.row_size, config.qkv_bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        layer, mla = self.layer, self.mla
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.q_proj is None else self.q_proj(x)
        q = q.view(-1, layer.num_qo_heads, layer.head_dim)
        q_nope, q_rope = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        c, k_rope = self.kv_a_proj_with_mqa(x).split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        k_rope = k_rope.unsqueeze(1)
        if self.rotary_emb is not None:
            q_rope, k_rope = self.rotary_emb(positions, q_rope, k_rope)
        row = torch.cat((self.kv_a_layernorm(c).unsqueeze(1), k_rope), dim=-1)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, row, row)
        q = torch.cat((q_nope, q_rope), dim=-1)
        output = attention.backend.run(q, layer, attention.plan, k=row)
        return self.o_proj(output.flatten(1))
