"""Kimi-Linear: most layers have KDA, whose decay is one for each channel, the others latent attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.reference.decoder import DecoderForCausalLM
from diptych.reference.models.qwen_next import GatedDeltaNet, QwenNextDecoderLayer
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.delta_net_modules import KimiDeltaModules


class KimiDeltaAttention(GatedDeltaNet, KimiDeltaModules):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        linear, wide = attention.linear, self.A_log.dtype
        assert linear is not None
        beta = torch.sigmoid(self.in_proj_b(x).to(wide))
        # How much of the state is kept: exp(g), for each head and channel of k.
        a = F.softplus(self.f_b_proj(self.f_a_proj(x)).to(wide) + self.dt_bias)
        g = -self.A_log.exp()[:, None] * a.unflatten(1, (len(self.A_log), -1))
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=1)
        o = linear.backend.run(qkv, g, beta, self.layer, linear.plan).to(wide)
        z = self.g_b_proj(self.g_a_proj(x)).view_as(o).to(wide)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.weight
        return self.out_proj((o * torch.sigmoid(z)).to(x.dtype).flatten(1))


class KimiLinearDecoderLayer(QwenNextDecoderLayer):
    linear_attention_class = KimiDeltaAttention


class KimiLinearForCausalLM(DecoderForCausalLM):
    layer_class = KimiLinearDecoderLayer
