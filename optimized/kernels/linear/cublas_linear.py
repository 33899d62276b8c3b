"""GEMMs by cuBLAS, which chooses its algorithm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

HALF_TYPES = (torch.float16, torch.bfloat16)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [num_tokens, in_features], weight [out_features, in_features] -> x @ weightᵀ + bias, rounded once, to
    out_dtype (default: x's); twice where cuBLAS has no GEMM of such types."""
    out_dtype = out_dtype or x.dtype
    if out_dtype == x.dtype or bias is not None or not x.is_cuda:
        return F.linear(x, weight, bias).to(out_dtype)
    return torch.mm(x, weight.T, out_dtype=out_dtype)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + linear(x), written over residual [num_tokens, out_features]. cuBLAS rounds the GEMM before
    it adds; a bias is added to the rounded sum."""
    residual.addmm_(x, weight.T)
    return residual if bias is None else residual.add_(bias)
