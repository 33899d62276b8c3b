"""Planted bugs in quantized linear layers."""

from __future__ import annotations

import torch

import diptych.reference.quantized.quantized_layers
from diptych.reference.quantized.quantized_layers import QuantizedLinear
from diptych.shared.modeling.dequantized_values import dequantize, dequantized_input
from tests.conformance.mutants.mutant import module_with, plant
from tests.planted import Bug


def quantized_linear(impl: type) -> Bug:
    """A class that takes the place of QuantizedLinear."""
    changed = module_with(diptych.reference.quantized.quantized_layers, QuantizedLinear=impl)
    return plant("quantization", changed, impl)


@quantized_linear
class SwapsNibbles(QuantizedLinear):
    """The high half of a byte is taken for the first input."""

    def dequantized_weight(self):
        is_int4 = self.scheme.weight_type == "int4"
        weight = (self.weight >> 4) | (self.weight << 4) if is_int4 else self.weight
        return dequantize(weight, self.weight_scale, self.weight_zero, self.scheme)


@quantized_linear
class DividesByTheScale(QuantizedLinear):
    """weight_scale_inv is taken by its name: the weight is divided by it."""

    def dequantized_weight(self):
        return dequantize(self.weight, 1.0 / self.weight_scale, self.weight_zero, self.scheme)


@quantized_linear
class IgnoresTheDivisor(QuantizedLinear):
    """NVFP4's scales are multiplied by their factor, and not divided by the divisor."""

    def dequantized_weight(self):
        weight = super().dequantized_weight()
        return weight if self.weight_global is None else weight * self.weight_global[:, 1:]


@quantized_linear
class ScalesOfTheNextGroup(QuantizedLinear):
    """Groups of inputs are off by one."""

    def dequantized_weight(self):
        return dequantize(self.weight, self.weight_scale.roll(1, 1), self.weight_zero, self.scheme)


@quantized_linear
class ForgetsToClamp(QuantizedLinear):
    """Inputs beyond a static scale are not clamped."""

    def dequantized_input(self, x):
        if self.input_scale is None:
            return super().dequantized_input(x)
        return x.float()


@quantized_linear
class RoundsTowardsZero(QuantizedLinear):
    """int8 inputs are cut off instead of rounded."""

    def dequantized_input(self, x):
        if self.scheme.weight_type != "int8" or self.scheme.inputs != "token":
            return super().dequantized_input(x)
        scale = x.float().abs().amax(1, keepdim=True) / 127.5
        scale = torch.where(scale == 0, 1.0, scale)
        return (x.float() / scale).trunc().clamp(-128, 127) * scale


@quantized_linear
class NaNForZeros(QuantizedLinear):
    """A token of zeros is divided by its scale of zero."""

    def dequantized_input(self, x):
        y = super().dequantized_input(x)
        if self.scheme.inputs != "token":
            return y
        return y / (x.float().abs().amax(1, keepdim=True) > 0) * 1.0


@quantized_linear
class ScaleOfTheRanksPart(QuantizedLinear):
    """A rank scales its part of a token by the largest value of the part."""

    def dequantized_input(self, x):
        return dequantized_input(x, self.scheme, self.input_scale)
