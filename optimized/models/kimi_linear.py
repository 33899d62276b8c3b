"""Kimi-Linear: most layers have KDA, whose decay is one for each channel, the others latent attention.

Differs from reference: as qwen_next.py does. The six matrices that multiply a layer's input are one GEMM.
"""

from __future__ import annotations

import torch

from diptych.optimized.decoder import DecoderForCausalLM
from diptych.optimized.kernels.recurrence.gates import decay_and_beta, norm_and_gate
from diptych.optimized.models.qwen_next import GatedDeltaNet, QwenNextDecoderLayer
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.delta_net_modules import KimiDeltaModules


class KimiDeltaAttention(GatedDeltaNet, KimiDeltaModules):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """x: from in_proj -> for out_proj, [num_tokens, num_v_heads * v_head_dim]."""
        linear = attention.linear
        assert linear is not None
        parts = self.in_proj.split(x)
        a = self.f_b_proj(parts["f_a_proj"].contiguous())
        g, beta = decay_and_beta(a, parts["in_proj_b"], self.A_log, self.dt_bias)
        o = linear.backend.run(x[:, : self.config.num_channels], g, beta, self.layer, linear.plan)
        z = self.g_b_proj(parts["g_a_proj"].contiguous())
        return norm_and_gate(o, z, self.norm.weight, self.eps, silu=False)


class KimiLinearDecoderLayer(QwenNextDecoderLayer):
    linear_attention_class = KimiDeltaAttention


class KimiLinearForCausalLM(DecoderForCausalLM):
    layer_class = KimiLinearDecoderLayer
