"""Qwen3-Next and Qwen3.5: most layers have linear attention, the others attention with a gate.

Differs from reference: the four projections of a linear layer are one GEMM; what is between them and the
recurrence is a kernel, and so is what is behind it. Attention and its norms are kernels of their own, as q
has gates between its heads. The last layer computes only the tokens whose hidden states are read.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.decoder import DecoderAttention, DecoderForCausalLM, DecoderLayer
from diptych.optimized.kernels.recurrence.gates import decay_and_beta, norm_and_gate
from diptych.optimized.layers import Linear, MergedLinear, add_and_norm, sum_later
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.moe import MoE
from diptych.shared.modeling.delta_net_modules import GatedDeltaNetModules
from diptych.shared.modeling.stream import Stream


class GatedDeltaNet(GatedDeltaNetModules):
    linear_class = Linear

    def make_projections(self, hidden_size: int, sizes: dict[str, int]) -> None:
        self.in_proj = MergedLinear(hidden_size, sizes)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """-> for out_proj, [num_tokens, num_v_heads * v_head_dim]."""
        linear = attention.linear
        assert linear is not None
        qkv, z, b, a = self.in_proj.split(self.in_proj(x)).values()
        g, beta = decay_and_beta(a, b, self.A_log, self.dt_bias)
        o = linear.backend.run(qkv, g, beta, self.layer, linear.plan)
        return norm_and_gate(o, z, self.norm.weight, self.eps)


class GatedAttention(DecoderAttention):
    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        parts = {**self.qkv_proj.parts, "q_proj": 2 * config.num_qo_heads * config.head_dim}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.qkv_bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """-> for o_proj, [num_tokens, num_qo_heads * head_dim]."""
        layer = self.layer
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = (
            part.unflatten(1, (-1, layer.head_dim)) for part in self.qkv_proj.split(self.qkv_proj(x)).values()
        )
        q, gate = q[:, ::2], q[:, 1::2]  # for each head q, then its gate
        q, k = self.rotary_emb(positions, self.q_norm(q.contiguous()), self.k_norm(k.contiguous()))
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        output = attention.backend.run(q, layer, attention.plan, k=k, v=v)
        return (output * torch.sigmoid(gate)).flatten(1)


class QwenNextDecoderLayer(DecoderLayer):
    attention_class = GatedAttention
    linear_attention_class = GatedDeltaNet

    def forward(self, x: Stream, positions: torch.Tensor, attention: BatchAttention) -> Stream:
        normed, residual = add_and_norm(self.input_layernorm, x)
        if self.linear_attn is not None:
            heads, projection = self.linear_attn(normed, positions, attention), self.linear_attn.out_proj
        else:
            heads, projection = self.self_attn(normed, positions, attention), self.self_attn.o_proj
        if self.is_last and attention.rows is not None:
            residual, heads = residual[attention.rows], heads[attention.rows]
        normed, residual = add_and_norm(
            self.post_attention_layernorm, self._add_later(projection, residual, heads)
        )
        if isinstance(self.mlp, MoE):
            return Stream(residual, sum_later(self.tp, self.mlp(normed)))
        return self._add_later(self.mlp.down_proj, residual, self.mlp.activate(normed))


class QwenNextForCausalLM(DecoderForCausalLM):
    layer_class = QwenNextDecoderLayer
