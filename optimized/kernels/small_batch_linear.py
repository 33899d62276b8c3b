"""Linear layers for a few tokens, with their neighbours in a decoder layer: the norm of their input, SwiGLU,
the sum with the residual stream.

Roofline bound: the weights' bytes over the memory's bandwidth; everything else is small.

Up to `max_tokens` tokens a kernel is chosen by shape, cuBLAS and elementwise kernels among them. Beyond,
cuBLAS and elementwise kernels always win (cublas_linear.py).
"""

from __future__ import annotations

import torch

from optimized.kernels import cublas_linear
from optimized.kernels.cta_gemv import MAX_ROWS, cta_gemv, suits
from optimized.kernels.cublas_linear import HALF_TYPES
from optimized.kernels.rms_norm import rms_norm
from optimized.kernels.silu_and_mul import silu_and_mul
from optimized.kernels.sliced_k_gemm import sliced_k_gemm
from optimized.kernels.tiled_gemm import MAX_TOKENS, has_descriptors, num_parts, tiled_gemm
from optimized.kernels.warp_gemv import warp_gemv

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
    kernel = kernel_for(x, weight)
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
) -> torch.Tensor:
    """linear(rms_norm(h)), the norm rounded as rms_norm does."""
    kernel = kernel_for(h, weight)
    if kernel not in NORM_KERNELS:
        return linear(rms_norm(h, norm_weight, eps), weight, bias)
    y = torch.empty(h.shape[0], weight.shape[0], dtype=h.dtype, device=h.device)
    NORM_KERNELS[kernel](h, weight, y, norm=(norm_weight, eps), bias=bias)
    return y


def norm_linear_silu(
    h: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor
) -> torch.Tensor:
    """linear_silu of rms_norm(h)."""
    kernel = kernel_for(h, gate_up_weight, gated=True)
    if kernel not in NORM_KERNELS:
        return linear_silu(rms_norm(h, norm_weight, eps), gate_up_weight)
    y = torch.empty(h.shape[0], gate_up_weight.shape[0] // 2, dtype=h.dtype, device=h.device)
    NORM_KERNELS[kernel](h, gate_up_weight, y, norm=(norm_weight, eps), gated=True)
    return y


def linear_silu(x: torch.Tensor, gate_up_weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded once (twice where the library multiplies). gate_up_weight [2 * n, in_features]
    has gate's rows first -> [num_tokens, n]."""
    kernel = kernel_for(x, gate_up_weight, gated=True)
    if kernel in ("sliced_k_gemm", "cublas"):
        return silu_and_mul(cublas_linear.linear(x, gate_up_weight))
    y = torch.empty(x.shape[0], gate_up_weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    KERNELS[kernel](x, gate_up_weight, y, gated=True)
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
    (`add_partial_sums_rms_norm`). None where a GEMM does better to add up everything itself."""
    if kernel_for(x, weight) in NORM_KERNELS or not _suits_tiles(x, weight):
        return None
    out, size = weight.shape
    parts = num_parts(x.shape[0], out, size)
    if parts == 1:
        return None
    y = torch.empty(parts, x.shape[0], out, dtype=torch.float32, device=x.device)
    tiled_gemm(x, weight, y)
    return y


def max_tokens(dtype: torch.dtype) -> int:
    """Up to how many tokens kernel_for may choose another than "cublas"."""
    return MAX_TOKENS if dtype in HALF_TYPES else 4


def kernel_for(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> str:
    """A key of KERNELS, or "cublas": the fastest for this shape, as measured on an H200
    (docs/lab/decode-batch-1.md, docs/lab/gemm.md)."""
    num_tokens, size = x.shape
    is_short = size <= 3072
    if num_tokens == 1 or (num_tokens <= 4 and is_short):
        return "cta_gemv" if suits(x, weight, gated) else "warp_gemv"
    if x.dtype not in HALF_TYPES:
        return "cublas"
    if not _suits_tiles(x, weight):  # routers, for one
        return "sliced_k_gemm" if num_tokens <= 16 and is_short and len(weight) <= 8192 else "cublas"
    if num_tokens > 32 and not is_short and (gated or weight.numel() <= 2**24):
        return "cublas"
    return "tiled_gemm"


def _suits_tiles(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype in HALF_TYPES and 1024 <= len(weight) <= MAX_ROWS and has_descriptors(x, weight)
