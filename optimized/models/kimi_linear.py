"""Kimi-Linear: most layers have KDA, whose decay is one for each channel, the others latent attention.

Differs from reference: as qwen_next.py does. The six matrices that multiply a layer's input are one GEMM.
"""

from __future__ import annotations

import torch

from diptych.optimized.decoder import DecoderForCausalLM
from diptych.optimized.models.qwen_next import GatedDeltaNet, QwenNextDecoderLayer
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.delta_net_modules import KimiDeltaModules


class KimiDeltaAttention(GatedDeltaNet, KimiDeltaModules):
    silu = False

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """x: from in_proj -> for out_proj, [num_tokens, num_v_heads * v_head_dim]."""
        linear = attention.linear
        assert linear is not None
        parts = self.in_proj.split(x)
        a = self.f_b_proj(parts["f_a_proj"].contiguous())
        z = self.g_b_proj(parts["g_a_proj"].contiguous())
        return self.attend(x[:, : self.config.num_channels], z, parts["in_proj_b"], a, linear)


class KimiLinearDecoderLayer(QwenNextDecoderLayer):
    linear_attention_class = KimiDeltaAttention


class KimiLinearForCausalLM(DecoderForCausalLM):
    layer_class = KimiLinearDecoderLayer
