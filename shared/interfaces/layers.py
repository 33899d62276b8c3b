"""Contracts of the layers that models are built from. A panel's `layers` module holds one class of each
name; models receive the module and build from it, so that a kernel author can swap it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import nn

from diptych.shared.config import RopeConfig


class RMSNorm(nn.Module, ABC):
    """y = x / sqrt(mean(x²) + eps) * weight, over the last dimension, the mean and the division in float32,
    the product with the weight in x's dtype. Parameter: `weight` [hidden_size]."""

    weight: nn.Parameter
    eps: float

    @abstractmethod
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype. x is not modified."""

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), which a kernel can compute in one pass. An implementation may
        write both results into its arguments: the caller must not use them afterwards."""
        total = x + residual
        return self.forward(total), total


class GemmaRMSNorm(RMSNorm, ABC):
    """y = x / sqrt(mean(x²) + eps) * (1 + weight), all in float32, rounded once. Otherwise as RMSNorm. For
    Gemma models only: a `layers` module may do without it."""


class RotaryEmbedding(nn.Module, ABC):
    """Rotates the first `rope.rotary_dim` dimensions of every head by position-dependent angles, halves
    convention (dimension i pairs with i + rotary_dim / 2; with rope.is_interleaved 2 i with 2 i + 1), in
    float32. The frequencies follow
    `rope.rope_type`, as in the papers and in Hugging Face's configs (`diptych.shared.modeling.rope`).

    A token's angles depend on its own position alone, also with "dynamic": past the trained length a token
    at position p turns with the frequencies of a sequence of p + 1 tokens. That is what decoding token by
    token gives everywhere; transformers gives a long prompt computed at once the frequencies of its whole
    length instead, so there an answer would depend on how the prompt was cut."""

    @abstractmethod
    def __init__(self, rope: RopeConfig, head_dim: int, context_len: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] int64; q, k [num_tokens, heads, head_dim] -> rotated, same shapes and
        dtypes. An implementation may rotate in place. With rope.mrope_section also positions [3, num_tokens],
        in time, by rows and by columns: `diptych.shared.modeling.rope.by_axis`."""


class SiluAndMul(nn.Module, ABC):
    """silu(gate) * up."""

    @abstractmethod
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[..., n], [..., n] -> [..., n] of the same dtype, contiguous; computed in float32. gate
        and up may be views: the halves of the rows of one tensor."""


class GeluTanhAndMul(nn.Module, ABC):
    """gelu(gate) * up, the gelu by the approximation with tanh: gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate +
    0.044715 gate³))). Otherwise as SiluAndMul. For Gemma models only: a `layers` module may do without it."""

    @abstractmethod
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[..., n], [..., n] -> [..., n]; gelu in float32, the result in the input's dtype."""


class MergedLinear(nn.Module, ABC):
    """Several linear layers of one input as one. Models may have it where a checkpoint has its parts: loading
    finds these by `weight_views`, a recorder by `split`."""

    @abstractmethod
    def weight_views(self) -> dict[str, torch.Tensor]:
        """Views that together cover the parameters, by the name that a checkpoint has for each, counted from
        the module that this one is in: "q_proj.weight"."""

    @abstractmethod
    def split(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """A result [..., out_features], cut into those of the parts: "q_proj" -> [..., its size]."""


class Layers(Protocol):
    """What a model asks of a `layers` module."""

    RMSNorm: type[RMSNorm]
    RotaryEmbedding: type[RotaryEmbedding]
    SiluAndMul: type[SiluAndMul]
