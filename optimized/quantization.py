"""Quantized linear layers.

Differs from reference: layers with one input are merged, like those of optimized/layers.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from optimized.layers import Linear, MergedLinear
from shared.interfaces import layers
from shared.interfaces import quantization as interface
from shared.modeling.quantization import dequantize, dequantized_input
from shared.types.quantization import QuantScheme


class QuantizedLinear(interface.QuantizedLinear):
    # --8<-- [start:quantized-linear]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.dequantized_input(x), self.dequantized_weight())
        return (y if self.bias is None else y + self.bias).to(x.dtype)
        # --8<-- [end:quantized-linear]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + forward(x). May be written over residual."""
        return residual.add_(self(x))

    def add_later(self, residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(add_to(residual, x), None): see `optimized.layers.Linear.add_later`."""
        return self.add_to(residual, x), None

    def dequantized_weight(self) -> torch.Tensor:
        return dequantize(self.weight, self.weight_scale, self.weight_zero, self.scheme)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        return dequantized_input(x, self.scheme, self.input_scale)


class QuantizedMergedLinear(QuantizedLinear, layers.MergedLinear):
    """Several QuantizedLinears of one input as one: their rows one below the other."""

    def __init__(
        self, in_features: int, parts: dict[str, int], scheme: QuantScheme, bias: bool = False
    ) -> None:
        if scheme.inputs == "static":
            raise ValueError(
                f"{', '.join(parts)} have a static input_scale each, and one merged layer has one input; "
                f"panel=reference does not merge"
            )
        super().__init__(in_features, sum(parts.values()), scheme, bias)
        self.parts = parts  # name -> rows of the weight

    def forward(self, x: torch.Tensor, norm: layers.RMSNorm | None = None) -> torch.Tensor:
        """The GEMM of x, or of norm(x)."""
        return super().forward(x if norm is None else norm(x))

    def weight_views(self) -> dict[str, torch.Tensor]:
        return {
            f"{part}.{name}": view
            for name, parameter in self.named_parameters()
            for part, view in zip(self.parts, parameter.split(list(self.parts.values())))
        }

    def split(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.parts, y.split(list(self.parts.values()), dim=-1)))


def quantized(module: nn.Module, scheme: QuantScheme) -> nn.Module | None:
    """What a model has in place of a linear layer whose weight is quantized; None for any other module."""
    if not isinstance(module, Linear):
        return None
    out_features, in_features = module.weight.shape
    has_bias = module.bias is not None
    if isinstance(module, MergedLinear):
        return QuantizedMergedLinear(in_features, module.parts, scheme, has_bias)
    return QuantizedLinear(in_features, out_features, scheme, has_bias)
