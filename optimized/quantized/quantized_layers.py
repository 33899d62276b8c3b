"""Quantized linear layers over merged weights.

Differs from reference: weights stay in 8 or 4 bits up to the tile of a GEMM, and inputs of 8 bits are
multiplied as such. A norm or SwiGLU before a layer also quantizes its input, except where it is divided
among ranks. For many tokens, cuBLAS multiplies row-wise FP8 where it is faster, and weights whose inputs are
not quantized are dequantized first. Falls back to the reference's way for groups that are not made of whole
tiles. Merged layers with static scales, one for each part, are a GEMM for each part. Deterministic mode has
one kernel and tile for any number of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.optimized.kernels.linear import fixed_order_gemm
from diptych.optimized.kernels.linear.dequantize import dequantize
from diptych.optimized.kernels.linear.quantize_input import QuantizedInput, quantize_input
from diptych.optimized.kernels.linear.quantized_choice import (
    FEW_TOKENS,
    goes_to_cublas,
    measured_tile,
    multiply,
    row_wise,
    suits_cublas,
)
from diptych.optimized.kernels.linear.quantized_gemm import MAX_TILES, quantized_gemm
from diptych.optimized.kernels.linear.quantized_tiles import can_compute, fixed_tile
from diptych.optimized.layers import Linear, MergedLinear, RMSNorm, SiluAndMul, is_builtin_layer
from diptych.shared.interfaces import layers
from diptych.shared.interfaces import quantization as interface
from diptych.shared.modeling.dequantized_values import dequantized_input
from diptych.shared.modeling.stream import Stream
from diptych.shared.types.quant_scheme import QuantScheme

MAX_WIDENED_TOKENS = 256
"""Beyond, it is faster to dequantize a whole weight than to widen its tiles for every 128 tokens."""


class QuantizedLinear(interface.QuantizedLinear):
    is_deterministic = False  # one kernel for any number of tokens
    counters: torch.Tensor | None = None

    # --8<-- [start:quantized-linear]
    def forward(self, x: torch.Tensor | QuantizedInput) -> torch.Tensor:
        if not can_compute(self.scheme, self.in_features):
            assert isinstance(x, torch.Tensor)
            multiply_all = fixed_order_gemm.linear if self.is_deterministic else F.linear
            y = multiply_all(self.dequantized_input(x), self.dequantized_weight())
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        x = self.quantize(x)
        num_tokens = len(x.q) if isinstance(x, QuantizedInput) else len(x)
        if self.is_deterministic:
            return self._in_fixed_order(x)
        if goes_to_cublas(x, self.weight, self.weight_scale, self.scheme):
            return self._row_wise(x)
        if isinstance(x, torch.Tensor) and num_tokens > MAX_WIDENED_TOKENS:
            return F.linear(x, self._dequantized(x.dtype), self.bias)
        y = torch.empty(num_tokens, self.out_features, dtype=x.dtype, device=self.weight.device)
        self._multiply(x, y)
        return y
        # --8<-- [end:quantized-linear]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor | QuantizedInput) -> torch.Tensor:
        """residual + forward(x), rounded once where Triton multiplies. May be written over residual."""
        if self.is_deterministic or not can_compute(self.scheme, self.in_features):
            return residual.add_(self(x))
        x = self.quantize(x)
        if len(residual) > FEW_TOKENS and measured_tile(x, self.weight, self.scheme) is None:
            return residual.add_(self(x))
        self._multiply(x, residual, residual)
        return residual

    def add_later(self, residual: torch.Tensor, x: torch.Tensor | QuantizedInput) -> Stream:
        """Do what `diptych.optimized.layers.Linear.add_later` does, with nothing pending."""
        return Stream(self.add_to(residual, x))

    def activated(self, act_fn: nn.Module, gate_up: torch.Tensor) -> torch.Tensor | QuantizedInput:
        """act_fn of the halves of gate_up, as forward takes it."""
        if self._quantizes and self.tp is None and is_builtin_layer(act_fn, SiluAndMul):
            return quantize_input(gate_up, self.scheme, self.input_scale, silu=True)
        return act_fn(*gate_up.chunk(2, dim=-1))

    def quantize(
        self, x: torch.Tensor | QuantizedInput, norm: layers.RMSNorm | None = None
    ) -> torch.Tensor | QuantizedInput:
        """x, or norm(x), as the GEMM takes it."""
        if self._quantizes and isinstance(x, torch.Tensor) and is_builtin_layer(norm, RMSNorm):
            return quantize_input(x, self.scheme, self.input_scale, norm=(norm.weight, norm.eps))
        if norm is not None:
            x = norm(x)
        if self._quantizes and isinstance(x, torch.Tensor):
            return quantize_input(x, self.scheme, self.input_scale, tp=self.tp)
        return x

    def dequantized_weight(self) -> torch.Tensor:
        return self._dequantized(torch.float32)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        if not self._quantizes:
            return dequantized_input(x, self.scheme, self.input_scale, self.tp)
        values = quantize_input(x, self.scheme, self.input_scale, tp=self.tp)
        scale = values.scale
        if scale.dim() == 2 and scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.scheme.unit(self.in_features), 1)[:, : self.in_features]
        return values.q.to(torch.float32) * scale

    @property
    def _quantizes(self) -> bool:
        """Whether a kernel quantizes the inputs."""
        return self.scheme.inputs != "none" and can_compute(self.scheme, self.in_features)

    @property
    def _zero(self) -> torch.Tensor | None:
        """The third tensor of a kernel: zero points, or the scales of NVFP4 for a layer."""
        return self.weight_zero if self.weight_global is None else self.weight_global

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(self.weight, self.weight_scale, self._zero, self.scheme, dtype)

    def _multiply(
        self, x: torch.Tensor | QuantizedInput, y: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        multiply(
            x, self.weight, self.weight_scale, self._zero, self.scheme, y,
            bias=self.bias, residual=residual, counters=self.counters,
        )  # fmt: skip

    def make_counters(self) -> None:
        """Counters of split-K, zeros between the calls of this layer. Made before graphs are captured: zeros
        made within one would be written whenever it runs."""
        if self.scheme.is_packed:
            self.counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=self.weight.device)

    def _in_fixed_order(self, x: torch.Tensor | QuantizedInput) -> torch.Tensor:
        """The bits of a row do not depend on the others: that was measured for cuBLAS's row-wise FP8 on an
        H200 at 1 to 4,096 tokens."""
        if suits_cublas(x, self.weight, self.weight_scale):
            return self._row_wise(x)
        num_tokens = len(x.q) if isinstance(x, QuantizedInput) else len(x)
        y = torch.empty(num_tokens, self.out_features, dtype=x.dtype, device=self.weight.device)
        quantized_gemm(
            x, self.weight, self.weight_scale, self._zero, self.scheme, y, bias=self.bias,
            tile=fixed_tile(self.scheme, self.in_features),
        )  # fmt: skip
        return y

    def _row_wise(self, x: QuantizedInput) -> torch.Tensor:
        y = row_wise(x, self.weight, self.weight_scale)
        return y if self.bias is None else y.add_(self.bias)


class QuantizedMergedLinear(QuantizedLinear, layers.MergedLinear):
    """Several QuantizedLinears of one input as one: their rows one below the other."""

    def __init__(
        self, in_features: int, parts: dict[str, int], scheme: QuantScheme, bias: bool = False
    ) -> None:
        super().__init__(in_features, sum(parts.values()), scheme, bias)
        self.parts = parts  # name -> rows of the weight
        if self.input_scale is not None:  # each part has its own
            self.input_scale = nn.Parameter(torch.empty(len(parts)), requires_grad=False)

    def forward(self, x: torch.Tensor | QuantizedInput, norm: layers.RMSNorm | None = None) -> torch.Tensor:
        """The GEMM of x, or of norm(x)."""
        if self.input_scale is not None:
            assert isinstance(x, torch.Tensor)
            return self._forward_by_part(x if norm is None else norm(x))
        return super().forward(x if norm is None else self.quantize(x, norm))

    def _forward_by_part(self, x: torch.Tensor) -> torch.Tensor:
        """Each part has a static scale for x."""
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        views = self.weight_views()
        for name, part in self.split(y).items():
            values = quantize_input(x, self.scheme, views[f"{name}.input_scale"])
            weight, scale = views[f"{name}.weight"], views[f"{name}.weight_scale"]
            tile = fixed_tile(self.scheme, self.in_features) if self.is_deterministic else None
            bias = views.get(f"{name}.bias")
            quantized_gemm(values, weight, scale, None, self.scheme, part, bias=bias, tile=tile)
        return y

    def weight_views(self) -> dict[str, torch.Tensor]:
        views: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            sizes = [1] * len(self.parts) if name == "input_scale" else list(self.parts.values())
            views |= {f"{part}.{name}": view for part, view in zip(self.parts, parameter.split(sizes))}
        return views

    def split(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.parts, y.split(list(self.parts.values()), dim=-1)))


def quantized(module: nn.Module, scheme: QuantScheme) -> nn.Module | None:
    """The quantized replacement of a linear layer; None for any other module."""
    if not isinstance(module, Linear):
        return None
    out_features, in_features = module.weight.shape
    has_bias = module.bias is not None
    if isinstance(module, MergedLinear):
        return QuantizedMergedLinear(in_features, module.parts, scheme, has_bias)
    return QuantizedLinear(in_features, out_features, scheme, has_bias)
