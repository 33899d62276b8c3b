"""GEMM for up to 16 tokens on the tensor cores, with the sum with the residual stream.

Roofline bound: the weights' bytes, out_features * in_features * itemsize, over the memory's bandwidth.

Shape: a CTA computes ROWS outputs of all tokens, so nothing is added up across CTAs. Outputs are few, so the
warps of a CTA share them by columns: each multiplies STEP columns of a tile, one matrix of a batch of WARPS,
and their sums are added at the end. A few tiles at a time are copied to shared memory. Before it waits for
the previous kernel (programmatic dependent launch, see warp_gemv), a CTA prefetches its rows of weights to
the L2 cache, which takes neither registers nor shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded

MAX_TOKENS = 16
ROWS = 64 if INTERPRETED else 16
WARPS, STEP, STAGES = 4, 128, 4


@triton.jit(do_not_specialize=["num_tokens"])
def _sliced_k_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr,
    num_tokens, stride_x, stride_weight, stride_residual, stride_y,
    OUT: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr, STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PREFETCH: tl.constexpr, USE_PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = WARPS * STEP
    first_row = tl.program_id(0) * ROWS
    columns = (tl.arange(0, WARPS)[:, None] * STEP + tl.arange(0, STEP)[None, :])[:, None, :]
    tile_rows = (first_row + tl.arange(0, ROWS))[None, :, None]
    tile = weight_ptr + tile_rows.to(tl.int64) * stride_weight + columns

    if PREFETCH:
        # Eighths of rows, so that every thread asks for one.
        pieces = tl.arange(0, ROWS * 8)
        piece_rows = tl.minimum(first_row + pieces // 8, OUT - 1).to(tl.int64)
        piece = weight_ptr + piece_rows * stride_weight + pieces % 8 * (SIZE // 8)
        piece_bytes = tl.full(
            [ROWS * 8], SIZE // 8 * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8), tl.int32
        )
        asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(
            asm, "=r,l,r", [piece.to(tl.int64), piece_bytes], tl.int32, is_pure=False, pack=1
        )
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    tokens = tl.arange(0, TOKENS)
    x_columns = (tl.arange(0, WARPS)[:, None] * STEP + tl.arange(0, STEP)[None, :])[:, :, None]
    x_tile = x_ptr + tokens[None, None, :] * stride_x + x_columns
    mask_tokens = (tokens < num_tokens)[None, None, :]
    mask_rows = tile_rows < OUT
    sums = tl.zeros([WARPS, ROWS, TOKENS], tl.float32)
    # The interpreter cannot multiply bfloat16.
    dtype: tl.constexpr = tl.float32 if INTERPRETED else x_ptr.dtype.element_ty
    for start in tl.range(0, SIZE, COLUMNS):
        x = tl.load(x_tile + start, mask=mask_tokens & (x_columns + start < SIZE), other=0.0).to(dtype)
        mask = mask_rows & (columns + start < SIZE)
        sums = tl.dot(tl.load(tile + start, mask=mask, other=0.0).to(dtype), x, sums)

    y = tl.sum(sums, 0)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    in_out = (rows < OUT) & (tokens < num_tokens)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + tokens[None, :] * stride_residual + rows, mask=in_out, other=0.0)
        y += residual.to(tl.float32)
    tl.store(y_ptr + tokens[None, :] * stride_y + rows, rounded(y, y_ptr.dtype.element_ty), mask=in_out)


def sliced_k_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """y = x @ weightᵀ + bias + residual, rounded once; y may be the residual. x is of a half type.

    x [num_tokens <= MAX_TOKENS, size], y [num_tokens, out]."""
    num_tokens, size = x.shape
    out = y.shape[1]
    assert num_tokens <= MAX_TOKENS
    assert weight.shape == (out, size)
    assert x.stride(1) == 1 == weight.stride(1) == y.stride(1)
    assert residual is None or residual.stride(1) == 1
    options = pdl_options(x)
    # Eighths of rows must begin at multiples of 16 bytes, and be such.
    is_aligned = size % 64 == weight.stride(0) % 8 == weight.data_ptr() % 16 == 0
    _sliced_k_gemm_kernel[(triton.cdiv(out, ROWS),)](
        x, weight, x if bias is None else bias, x if residual is None else residual, y,
        num_tokens, x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
        OUT=out, SIZE=size, TOKENS=max(8, triton.next_power_of_2(num_tokens)),
        ROWS=ROWS, WARPS=WARPS, STEP=STEP, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        PREFETCH=options["USE_PDL"] and is_aligned, INTERPRETED=INTERPRETED,
        num_warps=WARPS, num_stages=STAGES, **options,
    )  # fmt: skip
