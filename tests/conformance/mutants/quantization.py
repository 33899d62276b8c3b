"""Planted bugs in quantized linear layers."""

from __future__ import annotations

from dataclasses import replace

import torch

import diptych.reference.quantized.quantized_layers
from diptych.reference.quantized.quantized_layers import QuantizedLinear
from diptych.shared.modeling.dequantized_values import dequantize, dequantized_input
from tests.conformance.mutants.mutant import Mutant, module_with


def quantized_linear(impl: type) -> Mutant:
    """A class that takes the place of QuantizedLinear."""
    assert impl.__doc__, f"{impl.__name__}: say what goes wrong"
    return Mutant(
        "quantization",
        impl.__name__,
        module_with(diptych.reference.quantized.quantized_layers, QuantizedLinear=impl),
    )


@quantized_linear
class SwapsNibbles(QuantizedLinear):
    """The high half of a byte is taken for the first input."""

    def dequantized_weight(self):
        is_int4 = self.scheme.weight_type == "int4"
        weight = (self.weight >> 4) | (self.weight << 4) if is_int4 else self.weight
        return dequantize(weight, self.weight_scale, self.weight_zero, self.scheme)


@quantized_linear
class NeighboursShareAByte(QuantizedLinear):
    """A byte holds inputs 2 j and 2 j + 1, as in a checkpoint, instead of j and j + unit / 2."""

    def dequantized_weight(self):
        weight = super().dequantized_weight()
        if self.scheme.weight_type != "int4":
            return weight
        return weight.unflatten(1, (-1, 2, self.scheme.unit(self.in_features) // 2)).mT.flatten(1)


@quantized_linear
class ZeroOffByOne(QuantizedLinear):
    """The zero point is one less than stored: version 2 of GPTQ read as if it were undone twice."""

    def dequantized_weight(self):
        zero = None if self.weight_zero is None else self.weight_zero - 1
        return dequantize(self.weight, self.weight_scale, zero, self.scheme)


@quantized_linear
class SymmetricZeroIsSeven(QuantizedLinear):
    """The middle of 0 to 15 is taken for 7."""

    def dequantized_weight(self):
        weight = super().dequantized_weight()
        is_symmetric = self.scheme.weight_type == "int4" and self.scheme.symmetric
        return weight + self.weight_scale.repeat_interleave(
            self.in_features // self.weight_scale.shape[1], 1
        ) * is_symmetric if is_symmetric else weight  # fmt: skip


@quantized_linear
class DividesByTheScale(QuantizedLinear):
    """weight_scale_inv is taken by its name: the weight is divided by it."""

    def dequantized_weight(self):
        return dequantize(self.weight, 1.0 / self.weight_scale, self.weight_zero, self.scheme)


@quantized_linear
class ScalesOfAnotherShard(QuantizedLinear):
    """The second half of the outputs has the scales of the first."""

    def dequantized_weight(self):
        half = self.out_features // 2
        scale = torch.cat((self.weight_scale[: self.out_features - half], self.weight_scale[:half]))
        return dequantize(self.weight, scale, self.weight_zero, self.scheme)


@quantized_linear
class ScalesOfTheNextGroup(QuantizedLinear):
    """Groups of inputs are off by one."""

    def dequantized_weight(self):
        return dequantize(self.weight, self.weight_scale.roll(1, 1), self.weight_zero, self.scheme)


@quantized_linear
class OneScaleForTheBatch(QuantizedLinear):
    """The inputs of all tokens have one scale: an answer depends on what runs beside it."""

    def dequantized_input(self, x):
        if self.scheme.inputs not in ("token", "group") or x.numel() == 0:
            return super().dequantized_input(x)
        scheme = replace(self.scheme, inputs="token")
        return dequantized_input(x.reshape(1, -1), scheme, None).view(x.shape)


@quantized_linear
class TokenScalesForGroups(QuantizedLinear):
    """A token has one scale where its groups should have their own."""

    def dequantized_input(self, x):
        scheme = self.scheme
        if scheme.inputs == "group":
            scheme = replace(scheme, inputs="token")
        return dequantized_input(x, scheme, self.input_scale)


@quantized_linear
class PlainInputs(QuantizedLinear):
    """Inputs are not quantized for a few tokens, so answers depend on the batch size."""

    def forward(self, x):
        y = (x.float() if len(x) < 4 else self.dequantized_input(x)) @ self.dequantized_weight().T
        return (y if self.bias is None else y + self.bias).to(x.dtype)


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
class Steps127(QuantizedLinear):
    """int8 inputs are scaled by 127 instead of half of the whole range."""

    def dequantized_input(self, x):
        if self.scheme.weight_type != "int8" or self.scheme.inputs != "token":
            return super().dequantized_input(x)
        scale = x.float().abs().amax(1, keepdim=True) / 127
        scale = torch.where(scale == 0, 1.0, scale)
        return (x.float() / scale).round().clamp(-128, 127) * scale


@quantized_linear
class NaNForZeros(QuantizedLinear):
    """A token of zeros is divided by its scale of zero."""

    def dequantized_input(self, x):
        y = super().dequantized_input(x)
        if self.scheme.inputs != "token":
            return y
        return y / (x.float().abs().amax(1, keepdim=True) > 0) * 1.0


@quantized_linear
class AddsTheBiasTwice(QuantizedLinear):
    """The bias is added by the GEMM and after it."""

    def forward(self, x):
        y = super().forward(x)
        return y if self.bias is None else y + self.bias


@quantized_linear
class ScaleOfTheRanksPart(QuantizedLinear):
    """A rank scales its part of a token by the largest value of the part."""

    def dequantized_input(self, x):
        return dequantized_input(x, self.scheme, self.input_scale)
