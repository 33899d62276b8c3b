"""Planted bugs in the optimized quantized linear layers."""

from __future__ import annotations

from dataclasses import replace

import torch

import diptych.optimized.quantized.quantized_layers
from diptych.optimized.kernels.linear.quantize_input import QuantizedInput, quantize_input
from diptych.optimized.kernels.linear.quantized_gemm import quantized_gemm
from diptych.optimized.quantized.quantized_layers import QuantizedLinear
from tests.conformance.mutants.mutant import module_with, plant
from tests.planted import Bug


def quantized_linear(impl: type) -> Bug:
    """A class that takes the place of QuantizedLinear."""
    changed = module_with(diptych.optimized.quantized.quantized_layers, QuantizedLinear=impl)
    return plant("quantization", changed, impl, "Optimized")


@quantized_linear
class ScaleOfTheFirstToken(QuantizedLinear):
    """The GEMM multiplies every token by the scale of the first."""

    def quantize(self, x, norm=None):
        x = super().quantize(x, norm)
        if not isinstance(x, QuantizedInput) or len(x.scale) == 0:
            return x
        return replace(x, scale=x.scale[:1].expand_as(x.scale).contiguous())


@quantized_linear
class OneScaleForAllTokens(QuantizedLinear):
    """The largest value of the batch scales all tokens, in the kernel that quantizes."""

    def dequantized_input(self, x):
        if self.scheme.inputs != "token" or len(x) == 0:
            return super().dequantized_input(x)
        largest = x.float().abs().amax() / (448.0 if self.scheme.weight_type == "fp8" else 127.5)
        values = quantize_input(x, self.scheme, largest.view(1))
        return values.q.float() * values.scale


@quantized_linear
class ForgetsTheBias(QuantizedLinear):
    """The GEMM adds no bias."""

    def _multiply(self, x, y, residual=None):
        quantized_gemm(x, self.weight, self.weight_scale, self.weight_zero, self.scheme, y, residual=residual)


@quantized_linear
class DequantizesInHalf(QuantizedLinear):
    """The dequantized weight is rounded to bfloat16 for any type."""

    def _dequantized(self, dtype):
        return super()._dequantized(torch.bfloat16).to(dtype)


@quantized_linear
class QuantizesOnlyManyTokens(QuantizedLinear):
    """A few tokens are multiplied as they are, so answers depend on the batch size."""

    def forward(self, x):
        if len(x) > 8 or self.scheme.inputs == "none":
            return super().forward(x)
        y = x.float() @ self.dequantized_weight().T
        return (y if self.bias is None else y + self.bias).to(x.dtype)
