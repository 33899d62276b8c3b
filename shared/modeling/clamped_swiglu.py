"""The activation of GPT-OSS's experts, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


class ClampedSwiGLU(nn.Module):
    """gate * sigmoid(1.702 gate) * (up + 1); gate at most `limit`, up between -limit and limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 * n], gate first -> [..., n]"""
        gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1.0)).to(gate_up.dtype)
