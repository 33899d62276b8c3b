"""Chooses the norm and the activation of a `layers` module for a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from shared.config import ModelConfig
from shared.interfaces.layers import Layers, RMSNorm


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
