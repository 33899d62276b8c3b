"""Qwen3-Next and Qwen3.5: most layers have linear attention, the others attention with a gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from diptych.reference.decoder import DecoderAttention, DecoderForCausalLM, DecoderLayer
from diptych.reference.layers import Linear
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.delta_net_modules import GatedDeltaNetModules


class GatedDeltaNet(GatedDeltaNetModules):
    linear_class = Linear

    # --8<-- [start:gated-delta-net]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        linear, wide = attention.linear, self.A_log.dtype
        assert linear is not None
        beta = torch.sigmoid(self.in_proj_b(x).to(wide))
        # How much of the state is kept: exp(g), between 0 and 1.
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).to(wide) + self.dt_bias)
        o = linear.backend.run(self.in_proj_qkv(x), g, beta, self.layer, linear.plan).to(wide)
        z = self.in_proj_z(x).view_as(o).to(wide)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.weight
        return self.out_proj((o * F.silu(z)).to(x.dtype).flatten(1))
        # --8<-- [end:gated-delta-net]


class GatedAttention(DecoderAttention):
    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.q_proj = Linear(config.hidden_size, 2 * config.num_qo_heads * config.head_dim, config.qkv_bias)

    # --8<-- [start:gated-attention]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        layer = self.layer
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, gate = self.q_proj(x).view(-1, layer.num_qo_heads, 2 * layer.head_dim).chunk(2, dim=-1)
        k = self.k_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        v = self.v_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        output = attention.backend.run(q, layer, attention.plan, k=k, v=v)
        return self.o_proj((output * torch.sigmoid(gate)).flatten(1))
        # --8<-- [end:gated-attention]


class QwenNextDecoderLayer(DecoderLayer):
    attention_class = GatedAttention
    linear_attention_class = GatedDeltaNet

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        attend = self.self_attn if self.linear_attn is None else self.linear_attn
        x = x + self.tp.all_reduce(attend(self.input_layernorm(x), positions, attention))
        return x + self.tp.all_reduce(self.mlp(self.post_attention_layernorm(x)))


class QwenNextForCausalLM(DecoderForCausalLM):
    layer_class = QwenNextDecoderLayer
