"""Qwen3-Next and Qwen3.5: most layers have linear attention, the others attention with a gate.

Differs from reference: as decoder.py does. The four projections of a linear layer are one GEMM; what is
between them and the recurrence is a kernel, and so is what is behind it, and the gates of attention.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.decoder import DecoderAttention, DecoderForCausalLM, DecoderLayer
from diptych.optimized.kernels.recurrence.decode_step import Gates
from diptych.optimized.kernels.recurrence.gates import decay_and_beta, gate_heads, norm_and_gate
from diptych.optimized.layers import Linear, MergedLinear
from diptych.optimized.linear_attention import LinearAttention
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.linear_attention import BatchLinearAttention
from diptych.shared.modeling.delta_net_modules import GatedDeltaNetModules
from diptych.shared.modeling.stream import Stream


class GatedDeltaNet(GatedDeltaNetModules):
    linear_class = Linear
    silu = True  # the gate of the output

    def make_projections(self, hidden_size: int, sizes: dict[str, int]) -> None:
        self.in_proj = MergedLinear(hidden_size, sizes)

    @property
    def qkv_proj(self) -> MergedLinear:
        return self.in_proj

    @property
    def o_proj(self) -> Any:
        return self.out_proj

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """x: from in_proj -> for out_proj, [num_tokens, num_v_heads * v_head_dim]."""
        linear = attention.linear
        assert linear is not None
        qkv, z, b, a = self.in_proj.split(x).values()
        return self.attend(qkv, z, b, a, linear)

    def attend(
        self, u: torch.Tensor, z: torch.Tensor, b: torch.Tensor, a: torch.Tensor, linear: BatchLinearAttention
    ) -> torch.Tensor:
        """The output before `out_proj`: one launch where requests have one token each."""
        backend, weight = linear.backend, self.norm.weight
        if isinstance(backend, LinearAttention):
            gates = Gates(z, self.A_log, self.dt_bias, weight, self.eps, self.silu)
            y = backend.run_gated(u, a, b, gates, self.layer, linear.plan)
            if y is not None:
                return y
        g, beta = decay_and_beta(a, b, self.A_log, self.dt_bias)
        o = backend.run(u, g, beta, self.layer, linear.plan)
        return norm_and_gate(o, z, weight, self.eps, self.silu)


class GatedAttention(DecoderAttention):
    q_spacing = 2  # behind each head of q is its gate

    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        parts = {**self.qkv_proj.parts, "q_proj": self.q_spacing * config.num_qo_heads * config.head_dim}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.qkv_bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """x: from qkv_proj -> for o_proj, [num_tokens, num_qo_heads * head_dim]."""
        heads = super().forward(x, positions, attention)
        q = self.qkv_proj.split(x)["q_proj"].unflatten(1, (-1, self.layer.head_dim))
        return gate_heads(heads, q[:, 1::2])


class QwenNextDecoderLayer(DecoderLayer):
    attention_class = GatedAttention
    linear_attention_class = GatedDeltaNet

    def forward(self, x: Stream, positions: torch.Tensor, attention: BatchAttention) -> Stream:
        attend = self.self_attn if self.linear_attn is None else self.linear_attn
        return self.forward_through(attend, x, positions, attention)


class QwenNextForCausalLM(DecoderForCausalLM):
    layer_class = QwenNextDecoderLayer
