"""The norm and the activation of a model: of its `layers` module, or the one of GPT-OSS's experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.layers import Layers, RMSNorm


def norm_class(config: ModelConfig, layers: Layers) -> type[RMSNorm]:
    return _find(layers, "GemmaRMSNorm", config) if config.norm_unit_offset else layers.RMSNorm


def act_fn_class(config: ModelConfig, layers: Layers) -> type[nn.Module]:
    return _find(layers, "GeluTanhAndMul", config) if config.hidden_act == "gelu_tanh" else layers.SiluAndMul


def _find(layers: Any, name: str, config: ModelConfig) -> Any:
    """Find a class, which a user-provided module may lack."""
    if not hasattr(layers, name):
        raise ValueError(
            f"the layers of {getattr(layers, '__name__', layers)} have no {name}, which a "
            f"{config.architecture} needs: add one, or use layers=reference"
        )
    return getattr(layers, name)


class ClampedSwiGLU(nn.Module):
    """The activation of GPT-OSS's experts: gate * sigmoid(1.702 gate) * (up + 1); gate at most `limit`, up
    between -limit and limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[..., n], [..., n] -> [..., n]"""
        dtype, wide = up.dtype, torch.promote_types(up.dtype, torch.float32)
        gate, up = gate.to(wide).clamp(max=self.limit), up.to(wide).clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1.0)).to(dtype)
