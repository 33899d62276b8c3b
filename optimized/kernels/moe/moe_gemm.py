"""The experts' two GEMMs over blocks of tokens: silu(x @ gate) * (x @ up), and that @ down; or with biases
and clamped SwiGLU or GELU (moe_act.py).

Roofline bound: bytes for few tokens, the weights of all experts that are used: 6 * inter * hidden bytes each
in bfloat16 (Qwen3-30B-A3B, 64 tokens of 8 choices: nearly all of 128 experts, 1.2 GB, 0.28 ms at 4.3 TB/s);
operations for many, 6 * inter * hidden a pair (4096 tokens: 309 GFLOP, 0.40 ms at 780 TFLOP/s).

Shape: a CTA is one block of pairs of one expert (moe_align.py) by a tile of columns. Gate and up of the
same columns are one GEMM in one CTA, so that the 2 * inter columns never go to memory. Rows of x are
gathered by their pair; the activations between the two GEMMs lie in the order of blocks, so that the
second reads them in a row. Results are stored by pair, and added up by moe_combine.py: no atomics. A large
block whose second half is padding (every expert may have one at its end) is computed by half.

Blocks of few pairs swap the operands: weights are then the side that the tensor cores want 64 rows of.
Where the sizes allow it, weights come by tensor descriptor (the copy engine computes the addresses);
otherwise, and in the interpreter, by pointers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from diptych.optimized.kernels.moe.moe_act import bias_of, gated
from diptych.optimized.kernels.moe.moe_align import Blocks
from diptych.optimized.kernels.moe.moe_tiles import Tile
from diptych.optimized.kernels.portable import INTERPRETED, gpu_of, pdl_options, rounded

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _block_and_column(num_blocks, num_columns: tl.constexpr, GROUP: tl.constexpr):
    """CTAs in order: within a group of blocks all have the same columns before the next ones come, so
    that weights are read from memory once for neighbouring blocks of one expert."""
    program = tl.program_id(0)
    in_group = GROUP * num_columns
    first = program // in_group * GROUP
    group_size = tl.maximum(tl.minimum(num_blocks - first, GROUP), 1)
    rest = program - first * num_columns
    return first + rest % group_size, rest // group_size


@triton.jit
def _fits_in_half(pairs_ptr, block, num_pairs, BLOCK_M: tl.constexpr, HALVES: tl.constexpr):
    """Whether the second half of a block is padding."""
    if HALVES:
        fits = tl.load(pairs_ptr + block * BLOCK_M + BLOCK_M // 2) >= num_pairs
    else:
        fits: tl.constexpr = False
    return fits


@triton.jit
def _weights(w, expert, row, k, PARTS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr):  # fmt: skip
    """[PARTS * BLOCK_N, BLOCK_K] of an expert's weights [PARTS, ROWS, K], the same rows of each part."""
    if USE_TMA:
        tile = w.load([expert, 0, row, k]).reshape(PARTS * BLOCK_N, BLOCK_K)
    else:
        places = tl.arange(0, PARTS * BLOCK_N)
        rows, offs_k = row + places % BLOCK_N, k + tl.arange(0, BLOCK_K)
        offs_n = places // BLOCK_N * ROWS + rows
        addresses = w + expert.to(tl.int64) * (PARTS * ROWS * K) + offs_n[:, None] * K + offs_k[None, :]
        tile = tl.load(addresses, mask=(rows < ROWS)[:, None] & (offs_k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _product(
    x_rows, row_mask, w, expert, row,
    PARTS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [BLOCK_M, K], of which x_rows point to the first columns, by _weights, in float32; where SWAP, its
    transpose."""
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    if SWAP:
        acc = tl.zeros([PARTS * BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, PARTS * BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        mask = row_mask
        if K % BLOCK_K != 0:
            mask = mask & (k + offs_k < K)
        x = tl.load(x_rows + (k + offs_k), mask=mask, other=0.0)
        weights = _weights(w, expert, row, k, PARTS, ROWS, K, BLOCK_N, BLOCK_K, USE_TMA)
        if _INTERPRETED:  # it cannot multiply bfloat16
            x, weights = x.to(tl.float32), weights.to(tl.float32)
        if SWAP:
            acc = tl.dot(weights, x.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, weights.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _up_block(
    x_ptr, w13, bias_ptr, act_ptr, pairs_ptr, num_pairs, stride_x, expert, first_row, first_column,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + rows)
    x_rows = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * stride_x
    acc = _product(
        x_rows, (pairs < num_pairs)[:, None], w13, expert, first_column, 2, INTER, HIDDEN,
        BLOCK_M, BLOCK_N, BLOCK_K, SWAP, USE_TMA, PRECISION,
    )  # fmt: skip
    if SWAP:
        gate, up = acc.reshape(2, BLOCK_N, BLOCK_M).permute(2, 1, 0).split()
    else:
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
    offs_n = first_column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        gate += bias_of(bias_ptr, expert, 0, offs_n, offs_n < INTER, 2 * INTER)[None, :]
        up += bias_of(bias_ptr, expert, INTER, offs_n, offs_n < INTER, 2 * INTER)[None, :]
    act = rounded(gated(gate, up, LIMIT), act_ptr.dtype.element_ty)
    # Padding rows are stored as well: the results of the next GEMM for them are not used.
    act_rows = act_ptr + rows.to(tl.int64)[:, None] * INTER
    tl.store(act_rows + offs_n[None, :], act, mask=(offs_n < INTER)[None, :])


@triton.jit
def _down_block(
    act_ptr, w2, bias_ptr, out_ptr, pairs_ptr, num_pairs, weights_ptr, expert, first_row, first_column,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    act_rows = act_ptr + rows.to(tl.int64)[:, None] * INTER
    acc = _product(
        act_rows, (rows >= 0)[:, None], w2, expert, first_column, 1, HIDDEN, INTER,
        BLOCK_M, BLOCK_N, BLOCK_K, SWAP, USE_TMA, PRECISION,
    )  # fmt: skip
    if SWAP:
        acc = acc.T
    pairs = tl.load(pairs_ptr + rows)
    is_pair = pairs < num_pairs
    weights = tl.load(weights_ptr + pairs, mask=is_pair, other=0.0)
    offs_n = first_column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += bias_of(bias_ptr, expert, 0, offs_n, offs_n < HIDDEN, HIDDEN)[None, :]
    out_rows = out_ptr + pairs.to(tl.int64)[:, None] * HIDDEN
    y = rounded(acc * weights[:, None], out_ptr.dtype.element_ty)
    tl.store(out_rows + offs_n[None, :], y, mask=is_pair[:, None] & (offs_n < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _up_kernel(
    x_ptr, w13, bias_ptr, act_ptr, pairs_ptr, experts_ptr, num_blocks_ptr, num_pairs, stride_x,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, HALVES: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_blocks = tl.load(num_blocks_ptr)
    block, column = _block_and_column(num_blocks, tl.cdiv(INTER, BLOCK_N), GROUP)
    if block >= num_blocks:
        return
    expert = tl.load(experts_ptr + block)
    if _fits_in_half(pairs_ptr, block, num_pairs, BLOCK_M, HALVES):
        _up_block(
            x_ptr, w13, bias_ptr, act_ptr, pairs_ptr, num_pairs, stride_x, expert, block * BLOCK_M,
            column * BLOCK_N, TOP_K, HIDDEN, INTER, HAS_BIAS, LIMIT,
            BLOCK_M // 2, BLOCK_N, BLOCK_K, SWAP, USE_TMA, PRECISION,
        )  # fmt: skip
    else:
        _up_block(
            x_ptr, w13, bias_ptr, act_ptr, pairs_ptr, num_pairs, stride_x, expert, block * BLOCK_M,
            column * BLOCK_N, TOP_K, HIDDEN, INTER, HAS_BIAS, LIMIT,
            BLOCK_M, BLOCK_N, BLOCK_K, SWAP, USE_TMA, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    act_ptr, w2, bias_ptr, out_ptr, pairs_ptr, experts_ptr, num_blocks_ptr, weights_ptr, num_pairs,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, HALVES: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_blocks = tl.load(num_blocks_ptr)
    block, column = _block_and_column(num_blocks, tl.cdiv(HIDDEN, BLOCK_N), GROUP)
    if block >= num_blocks:
        return
    expert = tl.load(experts_ptr + block)
    if _fits_in_half(pairs_ptr, block, num_pairs, BLOCK_M, HALVES):
        _down_block(
            act_ptr, w2, bias_ptr, out_ptr, pairs_ptr, num_pairs, weights_ptr, expert, block * BLOCK_M,
            column * BLOCK_N, HIDDEN, INTER, HAS_BIAS,
            BLOCK_M // 2, BLOCK_N, BLOCK_K, SWAP, USE_TMA, PRECISION,
        )  # fmt: skip
    else:
        _down_block(
            act_ptr, w2, bias_ptr, out_ptr, pairs_ptr, num_pairs, weights_ptr, expert, block * BLOCK_M,
            column * BLOCK_N, HIDDEN, INTER, HAS_BIAS,
            BLOCK_M, BLOCK_N, BLOCK_K, SWAP, USE_TMA, PRECISION,
        )  # fmt: skip


def up_gemm(
    x: torch.Tensor,
    w13: torch.Tensor,
    blocks: Blocks,
    top_k: int,
    tile: Tile,
    b13: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> torch.Tensor:
    """x [num_tokens, hidden] -> gate with up (moe_act.py) of each row of `blocks`, [max rows, inter]."""
    hidden, inter = w13.shape[2], w13.shape[1] // 2
    max_blocks = blocks.experts.numel()
    act = torch.empty(max_blocks * tile.block_m, inter, dtype=x.dtype, device=x.device)
    use_tma = _can_use_descriptor(w13, tile)
    _up_kernel[(max_blocks * triton.cdiv(inter, tile.block_n),)](
        x, _operand(w13, 2, tile, use_tma), x if b13 is None else b13, act,
        blocks.pairs, blocks.experts, blocks.num_blocks, x.shape[0] * top_k, x.stride(0),
        TOP_K=top_k, HIDDEN=hidden, INTER=inter, HAS_BIAS=b13 is not None, LIMIT=swiglu_limit,
        USE_TMA=use_tma,
        **_options(x, tile),
    )  # fmt: skip
    return act


def down_gemm(
    act: torch.Tensor,
    w2: torch.Tensor,
    blocks: Blocks,
    topk_weights: torch.Tensor,
    tile: Tile,
    b2: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted result of each pair, [num_tokens, k, hidden]; that of padding pairs is undefined."""
    hidden, inter = w2.shape[1:]
    out = torch.empty(*topk_weights.shape, hidden, dtype=act.dtype, device=act.device)
    use_tma = _can_use_descriptor(w2, tile)
    _down_kernel[(blocks.experts.numel() * triton.cdiv(hidden, tile.block_n),)](
        act, _operand(w2, 1, tile, use_tma), act if b2 is None else b2, out,
        blocks.pairs, blocks.experts, blocks.num_blocks, topk_weights, topk_weights.numel(),
        HIDDEN=hidden, INTER=inter, HAS_BIAS=b2 is not None, USE_TMA=use_tma,
        **_options(act, tile),
    )  # fmt: skip
    return out


def _operand(w: torch.Tensor, parts: int, tile: Tile, use_tma: bool) -> torch.Tensor | TensorDescriptor:
    """w [num_experts, parts * rows, k]"""
    assert w.is_contiguous()
    if not use_tma:
        return w
    return TensorDescriptor.from_tensor(w.unflatten(1, (parts, -1)), [1, parts, tile.block_n, tile.block_k])


def _can_use_descriptor(w: torch.Tensor, tile: Tile) -> bool:
    return (
        tile.use_tma
        and w.dtype.itemsize == 2
        and w.data_ptr() % 16 == 0
        and w.shape[-1] % 8 == 0
        and gpu_of(w.device).is_hopper_or_newer
    )


def _options(x: torch.Tensor, tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": tile.group,
        "SWAP": tile.block_m < 64,
        "HALVES": tile.block_m == 128,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **pdl_options(x),
    }
