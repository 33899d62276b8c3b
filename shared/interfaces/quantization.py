"""Contract of quantized linear layers. A panel's `quantization` module holds the class, and a function that
makes one in place of a linear layer of the panel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import nn

from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.types.quant_scheme import QuantScheme


class QuantizedLinear(nn.Module, ABC):
    """y = x̂ @ ŵᵀ + bias, x̂ and ŵ being x and the weight as their quantized values say.

    Parameters: `weight`, `weight_scale`, and by scheme `weight_zero`, `weight_global` and `input_scale`,
    of the shapes and types of `QuantScheme.tensors`; `bias` [out_features] in the model's type, or None. They
    hold nothing until weights are loaded.

    ŵ[n, k] = (q[n, k] - zero[n, g]) * scale[n, g] with g = k // group_size, or 0. int4: of a unit of
    successive inputs (a group, or all), byte j holds input j in its low half and input j + unit / 2 in its
    high half; a symmetric weight has zero = 8. fp8 and int8 have no zero. nvfp4: packed as int4; q is what a
    code of `FP4_VALUES` stands for, and scale is weight_scale * weight_global[n, 0] / weight_global[n, 1].

    x̂ is x where inputs are not quantized. Else, for the values of a token, or of a group of a token, with
    s = amax / 448 (fp8) or amax / 127.5 (int8), or the static input_scale: x̂ = s * q. fp8: q is x / s clamped
    to ±448 and rounded to e4m3. int8: q is x / s rounded to an integer and clamped to -128..127. Ties go to
    even. s is float32; where it is 0, x̂ is 0. So the result of a token depends on no other token.

    With `tp`, x is the rank's part of the inputs of each token, and amax of a token is the largest of all
    ranks: each rank calls the layer with its part of the same tokens. So x̂ does not depend on the number of
    ranks. A group is never divided.

    Sums are in float32, or int32 for int8 within a group; the result is rounded to the type of x at the end.
    """

    scheme: QuantScheme
    in_features: int
    out_features: int
    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None
    weight_global: nn.Parameter | None
    input_scale: nn.Parameter | None
    bias: nn.Parameter | None
    tp: Collectives | None = None
    """The ranks among which the inputs of the layer are divided; None: it has all of them."""

    def __init__(self, in_features: int, out_features: int, scheme: QuantScheme, bias: bool = False) -> None:
        super().__init__()
        self.scheme, self.in_features, self.out_features = scheme, in_features, out_features
        self.weight_zero = self.weight_global = self.input_scale = self.bias = None
        for name, (shape, dtype) in scheme.tensors(out_features, in_features).items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False)

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features] of the same type."""

    @abstractmethod
    def dequantized_weight(self) -> torch.Tensor:
        """ŵ [out_features, in_features] float32."""

    @abstractmethod
    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """x̂, of the shape of x, float32."""


class Quantization(Protocol):
    """What loading asks of a `quantization` module."""

    QuantizedLinear: type[QuantizedLinear]

    @staticmethod
    def quantized(module: nn.Module, scheme: QuantScheme) -> nn.Module | None:
        """What a model has in place of a linear layer, or of experts, whose weights are quantized, with the
        same methods; None for a module that cannot be quantized. The module may be on "meta"."""
