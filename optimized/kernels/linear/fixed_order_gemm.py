"""GEMM whose rows do not depend on each other: the order of each sum is that of the columns, for any number
of tokens. For deterministic mode.

Roofline bound: the weights' bytes for few tokens, 2 * num_tokens * out * size operations for many.

Shape: a CTA computes a tile of [TOKENS, ROWS] outputs from all columns, `step` at a time. No split-K: partial
sums would be added in an order of their own. The size of a tile follows the number of tokens and of outputs;
the tensor cores add 16 columns at a time in any tile, so its sums have the same order. That was measured on
an H200, and `tests/kernels/test_fixed_order.py` tests it on each GPU. CTAs of the same weights are
neighbours, so that these are read from memory once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from diptych.optimized.kernels.linear.cublas_linear import HALF_TYPES
from diptych.optimized.kernels.linear.tiled_gemm import has_descriptors, tile_of
from diptych.optimized.kernels.portable import INTERPRETED, Gpu, gpu_of, pdl_options, rounded

GROUP = 8
"""Tiles of tokens whose CTAs run side by side."""


class Tile(NamedTuple):
    tokens: int
    rows: int  # outputs
    step: int  # columns loaded at a time
    num_warps: int
    num_stages: int


TILES = (
    Tile(256, 128, 64, 8, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 128, 4, 7),
    Tile(32, 64, 256, 4, 4),
    Tile(16, 64, 256, 4, 5),
)
"""From the most tokens to the fewest: each the fastest for some GEMM of an 8B model on an H200."""
FLOAT32_TILES = (Tile(64, 64, 64, 8, 2), Tile(16, 32, 64, 4, 3))


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_order_kernel(
    x, weight, bias_ptr, residual_ptr, y_ptr,
    num_tokens, out, size, stride_x, stride_weight, stride_residual, stride_y,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_row_tiles, num_token_tiles = tl.cdiv(out, ROWS), tl.cdiv(num_tokens, TOKENS)
    in_group = GROUP * num_row_tiles
    first = tl.program_id(0) // in_group * GROUP
    group_size = tl.minimum(num_token_tiles - first, GROUP)
    rest = tl.program_id(0) % in_group
    token, row = (first + rest % group_size) * TOKENS, rest // group_size * ROWS
    # The tensor cores need 64 rows on one side; with few tokens these are weights.
    TOKENS_FIRST: tl.constexpr = TOKENS >= 64
    y = tl.zeros([TOKENS, ROWS] if TOKENS_FIRST else [ROWS, TOKENS], tl.float32)
    # --8<-- [start:fixed-order]
    for k in range(0, size, STEP):
        tokens = tile_of(x, token, k, num_tokens, size, stride_x, TOKENS, STEP, USE_TMA)
        rows = tile_of(weight, row, k, out, size, stride_weight, ROWS, STEP, USE_TMA)
        if TOKENS_FIRST:
            y = tl.dot(tokens, rows.T, y, input_precision=PRECISION)
        else:
            y = tl.dot(rows, tokens.T, y, input_precision=PRECISION)
    # --8<-- [end:fixed-order]
    if not TOKENS_FIRST:
        y = y.T
    offs_t, offs_o = (token + tl.arange(0, TOKENS))[:, None], row + tl.arange(0, ROWS)[None, :]
    mask = (offs_t < num_tokens) & (offs_o < out)
    offs_t = offs_t.to(tl.int64)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_o, mask=offs_o < out, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offs_t * stride_residual + offs_o, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_t * stride_y + offs_o, rounded(y, y_ptr.dtype.element_ty), mask=mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [num_tokens, in_features], weight [out_features, in_features] -> x @ weightᵀ + bias, rounded once, to
    out_dtype (default: x's)."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    fixed_order_gemm(x, weight, y, bias=bias)
    return y


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + linear(x), rounded once, written over residual [num_tokens, out_features]."""
    fixed_order_gemm(x, weight, residual, bias=bias, residual=residual)
    return residual


def fixed_order_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """y = x @ weightᵀ + bias + residual, rounded once; y may be the residual. `tile`: default, by `plan`."""
    num_tokens, size = x.shape
    out = weight.shape[0]
    if num_tokens == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    assert weight.shape == (out, size)
    assert weight.stride(1) == 1 == y.stride(1)
    assert residual is None or residual.stride(1) == 1
    is_half = x.dtype in HALF_TYPES
    tile = tile or plan(num_tokens, out, is_half, gpu_of(x.device))
    use_tma = is_half and has_descriptors(x, weight)
    num_tiles = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(out, tile.rows)
    _fixed_order_kernel[(num_tiles,)](
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.step]) if use_tma else x,
        TensorDescriptor.from_tensor(weight, [tile.rows, tile.step]) if use_tma else weight,
        x if bias is None else bias, x if residual is None else residual, y,
        num_tokens, out, size, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0),
        TOKENS=tile.tokens, ROWS=tile.rows, STEP=tile.step, GROUP=GROUP,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        PRECISION="tf32" if is_half else "ieee", USE_TMA=use_tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(x),
    )  # fmt: skip


@cache
def plan(num_tokens: int, out: int, is_half: bool, gpu: Gpu) -> Tile:
    """Up to 64 tokens the smallest tile that holds them; above, the tile with the least estimated time. That
    is waves of CTAs, each as long as its tile's loads. Weights cost more than tokens, which come from the L2
    cache. A CTA's start and end have a cost of their own. A tile of tokens that is partly empty costs as much
    as two. With these constants each measured GEMM takes the fastest tile or one at most 5 % slower."""
    if INTERPRETED:  # whose GEMM may add in another order for another tile shape
        return Tile(64, 64, 64, 4, 1)
    item_size = 2 if is_half else 4

    def fitted(tile: Tile) -> Tile:
        num_fitting = gpu.shared_memory // ((tile.tokens + tile.rows) * tile.step * item_size)
        return tile._replace(num_stages=min(tile.num_stages, num_fitting))

    def time(tile: Tile) -> int:
        num_token_tiles = triton.cdiv(num_tokens, tile.tokens)
        num_waves = triton.cdiv(num_token_tiles * triton.cdiv(out, tile.rows), gpu.num_multiprocessors)
        cost = num_waves * (tile.rows * (tile.tokens + 32) + 8192)
        return cost + (cost // num_token_tiles if num_tokens % tile.tokens else 0)

    tiles = [fitted(tile) for tile in (TILES if is_half else FLOAT32_TILES)]
    tiles = [tile for tile in tiles if tile.num_stages >= 2]
    if num_tokens <= 64:
        return next(tile for tile in reversed(tiles) if tile.tokens >= num_tokens)
    return min(tiles, key=time)


def sizes_of_all_tiles(outs: Iterable[int], above: int, most: int, is_half: bool, gpu: Gpu) -> list[int]:
    """Numbers of tokens above `above` and up to `most`: between them they take each tile that such a number
    takes for these numbers of outputs. A number between two multiples of 16 takes the tile of the one behind
    the first."""
    firsts: dict[tuple[int, Tile], int] = {}
    for num_tokens in sorted({above + 1, *range(1, most + 1, 16), *range(16, most + 1, 16)}):
        for out in outs if above < num_tokens <= most else ():
            firsts.setdefault((out, plan(num_tokens, out, is_half, gpu)), num_tokens)
    return sorted({*firsts.values()})
