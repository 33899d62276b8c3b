"""Linear layers for a few tokens, fused with neighbouring operations of a decoder layer: the norm of their
input, SwiGLU, the sum with the residual stream.

Roofline bound: the weights' bytes over the memory's bandwidth; everything else is small.

Up to `max_tokens` tokens a kernel is chosen by shape (linear_choice.py), cuBLAS and elementwise kernels among
them. For more tokens, cuBLAS and elementwise kernels are always faster (cublas_linear.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from diptych.optimized.kernels.linear import cublas_linear
from diptych.optimized.kernels.linear.cta_gemv import cta_gemv
from diptych.optimized.kernels.linear.linear_choice import kernel_for, suits_tiles
from diptych.optimized.kernels.linear.rms_norm import rms_norm
from diptych.optimized.kernels.linear.silu_and_mul import silu_and_mul
from diptych.optimized.kernels.linear.sliced_k_gemm import sliced_k_gemm
from diptych.optimized.kernels.linear.tiled_gemm import num_parts, tiled_gemm
from diptych.optimized.kernels.linear.warp_gemv import Norm, warp_gemv

KERNELS = {
    "warp_gemv": warp_gemv,
    "cta_gemv": cta_gemv,
    "sliced_k_gemm": sliced_k_gemm,
    "tiled_gemm": tiled_gemm,
}
NORM_KERNELS = {"warp_gemv": warp_gemv, "cta_gemv": cta_gemv}
"""Of these, those that norm x themselves."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [num_tokens, in_features], weight [out_features, in_features] -> x @ weightᵀ + bias, rounded once, to
    out_dtype (default: x's)."""
    return linear_with(kernel_for(x, weight), x, weight, bias, out_dtype)


def linear_with(
    kernel: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """linear by a key of KERNELS or "cublas"."""
    if kernel == "cublas":
        return cublas_linear.linear(x, weight, bias, out_dtype)
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    KERNELS[kernel](x, weight, y, bias=bias)
    return y


def norm_linear(
    h: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> torch.Tensor:
    """linear(rms_norm(h)), the norm rounded as rms_norm does. `unit_offset`: as in GemmaRMSNorm."""
    kernel = kernel_for(h, weight)
    if kernel not in NORM_KERNELS:
        return linear(rms_norm(h, norm_weight, eps, unit_offset), weight, bias)
    y = torch.empty(h.shape[0], weight.shape[0], dtype=h.dtype, device=h.device)
    NORM_KERNELS[kernel](h, weight, y, norm=Norm(norm_weight, eps, unit_offset), bias=bias)
    return y


def norm_linear_silu(
    h: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up_weight: torch.Tensor,
    unit_offset: bool = False,
) -> torch.Tensor:
    """linear_silu of rms_norm(h)."""
    kernel = kernel_for(h, gate_up_weight, gated=True)
    if kernel not in NORM_KERNELS:
        return linear_silu(rms_norm(h, norm_weight, eps, unit_offset), gate_up_weight)
    y = torch.empty(h.shape[0], gate_up_weight.shape[0] // 2, dtype=h.dtype, device=h.device)
    NORM_KERNELS[kernel](h, gate_up_weight, y, norm=Norm(norm_weight, eps, unit_offset), gated=True)
    return y


def linear_silu(x: torch.Tensor, gate_up_weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded once (twice where the library multiplies). gate_up_weight [2 * n, in_features]
    has gate's rows first -> [num_tokens, n]."""
    return linear_silu_with(kernel_for(x, gate_up_weight, gated=True), x, gate_up_weight)


def linear_silu_with(kernel: str, x: torch.Tensor, gate_up_weight: torch.Tensor) -> torch.Tensor:
    """linear_silu by a key of KERNELS or "cublas"."""
    if kernel in ("sliced_k_gemm", "cublas"):
        return silu_and_mul(cublas_linear.linear(x, gate_up_weight))
    y = torch.empty(x.shape[0], gate_up_weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    run: Callable[..., None] = KERNELS[kernel]
    run(x, gate_up_weight, y, gated=True)
    return y


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + linear(x), rounded once (by cuBLAS: see there), written over residual [num_tokens,
    out_features]."""
    kernel = kernel_for(x, weight)
    if kernel == "cublas":
        return cublas_linear.linear_add(x, weight, residual, bias)
    KERNELS[kernel](x, weight, residual, bias=bias, residual=residual)
    return residual


def linear_partial_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """float32 [parts, num_tokens, out_features]: their sum is linear(x), for a norm to add
    (`add_partial_sums_rms_norm`). None if a GEMM that adds up everything itself is faster."""
    if kernel_for(x, weight) in NORM_KERNELS or not suits_tiles(x, weight):
        return None
    out, size = weight.shape
    parts = num_parts(x.shape[0], out, size)
    if parts == 1:
        return None
    y = torch.empty(parts, x.shape[0], out, dtype=torch.float32, device=x.device)
    tiled_gemm(x, weight, y)
    return y
