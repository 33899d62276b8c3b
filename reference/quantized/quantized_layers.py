"""Quantized linear layers: dequantize, then multiply in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.reference.layers import Linear
from diptych.shared.interfaces import quantization as interface
from diptych.shared.modeling.dequantized_values import dequantize, dequantized_input
from diptych.shared.types.quant_scheme import QuantScheme


class QuantizedLinear(interface.QuantizedLinear):
    # --8<-- [start:quantized-linear]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.dequantized_input(x), self.dequantized_weight())
        return (y if self.bias is None else y + self.bias).to(x.dtype)
        # --8<-- [end:quantized-linear]

    def dequantized_weight(self) -> torch.Tensor:
        zero = self.weight_zero if self.weight_global is None else self.weight_global
        return dequantize(self.weight, self.weight_scale, zero, self.scheme)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        return dequantized_input(x, self.scheme, self.input_scale, self.tp)


def quantized(module: nn.Module, scheme: QuantScheme) -> nn.Module | None:
    """The quantized replacement of a linear layer; None for any other module."""
    if not isinstance(module, Linear):
        return None
    out_features, in_features = module.weight.shape
    return QuantizedLinear(in_features, out_features, scheme, module.bias is not None)
