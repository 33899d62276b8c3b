"""Chooses the kernel of a linear layer for few tokens: from the GPU's table (`gpu_table`), by weight shape
and number of tokens, if `diptych tune` has measured it; otherwise by a rule.

The rule was found on an H200 in whole decode steps (docs/lab/decode-batch-1.md, docs/lab/gemm.md), which
include effects of neighbouring layers. A table, which times each layer alone, is for other GPUs.
"""

from __future__ import annotations

from functools import cache

import torch

from diptych.optimized.kernels import gpu_table
from diptych.optimized.kernels.linear import cta_gemv, sliced_k_gemm, tiled_gemm
from diptych.optimized.kernels.linear.cublas_linear import HALF_TYPES

MAX_GEMV_TOKENS = 4


def max_tokens(dtype: torch.dtype) -> int:
    """The largest number of tokens for which kernel_for may choose a kernel other than "cublas"."""
    return tiled_gemm.MAX_TOKENS if dtype in HALF_TYPES else MAX_GEMV_TOKENS


def kernel_for(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> str:
    """A key of `small_batch_linear.KERNELS`, or "cublas". x [num_tokens, in_features], weight [out_features,
    in_features]; gated: it holds the gate's rows, then as many of up."""
    num_tokens = len(x)
    if x.device.type == "cuda" and num_tokens <= max_tokens(x.dtype) and x.dtype in HALF_TYPES:
        measured = _measured(x.device).get(shape_name(weight.shape, gated))
        sizes = [size for size in measured or () if size >= num_tokens]
        if measured and sizes:
            kernel = measured[min(sizes)]
            return kernel if kernel in candidates(x, weight, gated) else "cublas"
    return rule(x, weight, gated)


def rule(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> str:
    """The fastest for this shape, as measured on an H200."""
    num_tokens, size = x.shape
    is_short = size <= 3072
    if num_tokens == 1 or (num_tokens <= MAX_GEMV_TOKENS and is_short):
        return "cta_gemv" if _suits_cta_gemv(x, weight, gated) else "warp_gemv"
    if x.dtype not in HALF_TYPES:
        return "cublas"
    if not suits_tiles(x, weight):  # for example routers
        is_small = num_tokens <= sliced_k_gemm.MAX_TOKENS and is_short and len(weight) <= 8192
        return "sliced_k_gemm" if is_small else "cublas"
    if num_tokens > 32 and not is_short and (gated or weight.numel() <= 2**24):
        return "cublas"
    return "tiled_gemm"


def candidates(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> list[str]:
    """The kernels that can compute this layer, "cublas" among them."""
    num_tokens, found = len(x), ["cublas"]
    if num_tokens <= MAX_GEMV_TOKENS:
        found.append("warp_gemv")
    if x.dtype in HALF_TYPES and cta_gemv.can_compute(x, weight):
        found.append("cta_gemv")
    if num_tokens <= sliced_k_gemm.MAX_TOKENS and x.dtype in HALF_TYPES and not gated:
        found.append("sliced_k_gemm")
    if num_tokens <= tiled_gemm.MAX_TOKENS and suits_tiles(x, weight):
        found.append("tiled_gemm")
    return found


def shape_name(shape: tuple[int, ...], gated: bool) -> str:
    return f"{shape[0]} x {shape[1]}{' gated' if gated else ''}"


def describe(device: torch.device) -> str:
    """Whether measured choices are used on this GPU."""
    gpu = torch.cuda.get_device_name(device)
    count = len(gpu_table.read(gpu).linear)
    return f"{count} shapes of linear layers" if count else "linear layers by the rule of the H200"


def _suits_cta_gemv(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> bool:
    """Whether it was faster than warp_gemv: for GEMMs of Qwen3-8B, Llama-3.1-8B and Qwen3-14B whose
    rows have the length of a hidden state, except 8B's gate and up, and for O of Qwen3-30B-A3B."""
    rows, size = weight.shape
    if len(x) != 1 or x.element_size() != 2 or rows > cta_gemv.MAX_ROWS:
        return False
    if size == 5120:
        return rows >= size
    return size == 4096 and (rows >= 28672 if gated else 2048 <= rows <= 2 * size)


def suits_tiles(x: torch.Tensor, weight: torch.Tensor) -> bool:
    is_usual = x.dtype in HALF_TYPES and 1024 <= len(weight) <= cta_gemv.MAX_ROWS
    return is_usual and tiled_gemm.has_descriptors(x, weight)


@cache
def _measured(device: torch.device) -> dict[str, dict[int, str]]:
    """Shape name -> number of tokens -> the kernel up to that number."""
    return {
        name: {int(size): str(kernel) for size, kernel in kernels.items()}
        for name, kernels in gpu_table.read(torch.cuda.get_device_name(device)).linear.items()
    }
