"""Rows sorted by expert for the libraries' grouped GEMMs, their inputs in FP8, and the weighted sum of their
results; choices without padding for those that sort by themselves.

Roofline bound: of the order, a few bytes a pair of token and expert, so a launch; of the inputs, a row of x
read and a quantized row written for each pair; of the sum, k + 1 rows of hidden a token.

Shape: `moe_align` sorts without atomics, so the same choices give the same rows, always. Nothing waits for a
count to reach the CPU, and shapes follow from the number of tokens alone: a CUDA graph can hold all of it. A
CTA quantizes the row of a pair straight into its slot, so no launch gathers or scatters rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.linear.quantize_input import QuantizedInput, e4m3_code, has_fp8
from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.kernels.portable import largest_or_nan, pdl_options, rounded
from diptych.shared.interfaces.moe import TopKOutput

BLOCK_ROWS = 128
TILE_ELEMENTS = 8192
FP8_GROUP = 128
"""Successive inputs with one scale."""


class SortedPairs(NamedTuple):
    """Pairs of token and expert, token * k + choice, sorted by expert."""

    pairs: torch.Tensor  # int32 [rows]: the pair of a row; num_pairs: the row has none
    experts: torch.Tensor  # int32 [rows]: the expert of a row; behind the last row of all experts -1
    slots: torch.Tensor  # int64 [num_tokens, k]: the row of a pair; the number of rows for a choice of -1
    first: torch.Tensor  # int32 [num_experts]: the first row of an expert; 0 for one without pairs
    counts: torch.Tensor  # int32 [num_experts]: the number of pairs of an expert


@triton.jit(do_not_specialize=["num_pairs", "num_rows", "no_slot"])
def _slots_kernel(
    blocks_pairs_ptr, blocks_experts_ptr, num_blocks_ptr, ids_ptr,
    pairs_ptr, experts_ptr, slots_ptr, first_ptr, end_ptr, num_pairs, num_rows, no_slot,
    ALIGNMENT: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_used = tl.load(num_blocks_ptr) * ALIGNMENT
    is_used = rows < num_used
    pairs = tl.load(blocks_pairs_ptr + rows, mask=is_used, other=num_pairs)
    experts = tl.load(blocks_experts_ptr + rows // ALIGNMENT, mask=is_used, other=-1)
    is_pair = pairs < num_pairs
    slots = experts * ALIGNMENT + rows % ALIGNMENT if BY_EXPERT else rows
    tl.store(slots_ptr + pairs, slots.to(tl.int64), mask=is_pair)
    tl.store(pairs_ptr + rows, pairs, mask=rows < num_rows)
    tl.store(experts_ptr + rows, experts, mask=rows < num_rows)
    before = tl.load(blocks_experts_ptr + (rows - 1) // ALIGNMENT, mask=is_used & (rows > 0), other=-1)
    after = tl.load(blocks_experts_ptr + (rows + 1) // ALIGNMENT, mask=rows + 1 < num_used, other=-1)
    next_pair = tl.load(blocks_pairs_ptr + rows + 1, mask=rows + 1 < num_used, other=num_pairs)
    tl.store(first_ptr + experts, rows, mask=is_pair & (before != experts))
    is_last = is_pair & ((after != experts) | (next_pair == num_pairs))
    tl.store(end_ptr + experts, rows + 1, mask=is_last)
    ids = tl.load(ids_ptr + rows, mask=rows < num_pairs, other=0)
    tl.store(slots_ptr + rows, no_slot.to(tl.int64), mask=ids < 0)


def sort_pairs(
    topk_ids: torch.Tensor, num_experts: int, alignment: int = 1, by_expert: bool = False
) -> SortedPairs:
    """topk_ids int32 [num_tokens, k], -1 for padding. The rows of an expert begin at a multiple of
    `alignment`. by_expert: a slot is instead in `alignment` rows for each expert, of which none has more
    pairs."""
    topk_ids = topk_ids.contiguous()
    num_pairs, device = topk_ids.numel(), topk_ids.device
    blocks = align(topk_ids, num_experts, alignment)
    num_rows = blocks.experts.numel() * alignment
    pairs, experts = torch.empty(2, num_rows, dtype=torch.int32, device=device).unbind()
    slots = torch.empty(topk_ids.shape, dtype=torch.int64, device=device)
    first, end = torch.zeros(2, num_experts, dtype=torch.int32, device=device).unbind()
    _slots_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
        *blocks, topk_ids, pairs, experts, slots, first, end, num_pairs, num_rows,
        num_experts * alignment if by_expert else num_rows,
        ALIGNMENT=alignment, BY_EXPERT=by_expert, BLOCK=BLOCK_ROWS, num_warps=4, **pdl_options(topk_ids),
    )  # fmt: skip
    return SortedPairs(pairs, experts, slots, first, end - first)


@triton.jit(do_not_specialize=["no_slot"])
def _quantize_pairs_kernel(
    x_ptr, slots_ptr, q_ptr, scale_ptr, no_slot, stride_x,
    TOP_K: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
    NATIVE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + pair)
    if slot == no_slot:
        return
    offs = tl.arange(0, BLOCK)
    mask = offs < SIZE
    x_row = x_ptr + (slot if SILU else (pair // TOP_K).to(tl.int64)) * stride_x
    x = tl.load(x_row + offs, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(x_row + SIZE + offs, mask=mask, other=0.0).to(tl.float32)
        x = rounded(x / (1.0 + tl.exp(-x)) * up, x_ptr.dtype.element_ty).to(tl.float32)
    groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
    largest = largest_or_nan(tl.abs(groups), 1)
    scale = tl.div_rn(largest, tl.full([BLOCK // GROUP], 448.0, tl.float32))
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scale_ptr + slot * (SIZE // GROUP) + group, scale, mask=group < SIZE // GROUP)
    divisor = tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale)[:, None], (BLOCK // GROUP, GROUP))
    quotient = tl.reshape(tl.div_rn(groups, divisor), (BLOCK,))
    tl.store(q_ptr + slot * SIZE + offs, e4m3_code(tl.clamp(quotient, -448.0, 448.0), NATIVE), mask=mask)


def quantize_pairs(x: torch.Tensor, slots: torch.Tensor, num_rows: int, silu: bool = False) -> QuantizedInput:
    """The inputs of a grouped GEMM, e4m3 [num_rows, size] with a scale for each 128, as `quantize_input` has
    them: of x [num_tokens, size] in each of a token's slots; with silu, of silu(first half) * second half of
    x [num_rows, 2 * size] in the same row. The other rows are uninitialized."""
    size, device = x.shape[1] // 2 if silu else x.shape[1], x.device
    assert x.stride(1) == 1
    assert size % FP8_GROUP == 0
    q = torch.empty(num_rows, size, dtype=torch.uint8, device=device)
    scale = torch.empty(num_rows, size // FP8_GROUP, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(size)
    _quantize_pairs_kernel[(slots.numel(),)](
        x, slots, q, scale, num_rows, x.stride(0), TOP_K=slots.shape[1], SIZE=size, GROUP=FP8_GROUP,
        BLOCK=block, SILU=silu, NATIVE=has_fp8(device), num_warps=min(max(block // 512, 1), 16),
        **pdl_options(x),
    )  # fmt: skip
    return QuantizedInput(q.view(torch.float8_e4m3fn), scale, x.dtype)


@triton.jit
def _weighted_sum_kernel(
    rows_ptr, slots_ptr, weights_ptr, y_ptr, num_rows,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, BLOCK_J)[:, None]
    offs = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_choice = choices < TOP_K
    slots = tl.load(slots_ptr + token * TOP_K + choices, mask=is_choice, other=num_rows)
    weights = tl.load(weights_ptr + token * TOP_K + choices, mask=is_choice, other=0.0)
    # The weight of a choice of -1 may be NaN.
    has_row = slots < num_rows
    results = tl.load(rows_ptr + slots * HIDDEN + offs, mask=has_row & (offs < HIDDEN), other=0.0)
    weighted = tl.where(has_row, results.to(tl.float32) * weights, 0.0)
    y = rounded(tl.sum(weighted, axis=0, keep_dims=True), y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * HIDDEN + offs, y, mask=offs < HIDDEN)


def weighted_sum(rows: torch.Tensor, slots: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
    """rows [num_rows, hidden] -> [num_tokens, hidden]; in float32, in the order of choices."""
    (num_rows, hidden), (num_tokens, top_k) = rows.shape, slots.shape
    y = torch.empty(num_tokens, hidden, dtype=rows.dtype, device=rows.device)
    block_j = triton.next_power_of_2(top_k)
    block_n = min(triton.next_power_of_2(hidden), max(TILE_ELEMENTS // block_j, 128))
    _weighted_sum_kernel[(num_tokens, triton.cdiv(hidden, block_n))](
        rows, slots, topk.topk_weights.contiguous(), y, num_rows, TOP_K=top_k, HIDDEN=hidden, BLOCK_J=block_j,
        BLOCK_N=block_n, num_warps=4, **pdl_options(rows),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["num_tokens"])
def _distinct_kernel(
    ids_ptr, weights_ptr, new_ids_ptr, new_weights_ptr, num_tokens,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    tokens, slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    places = tokens[:, None] * TOP_K + slots[None, :]
    mask = (tokens < num_tokens)[:, None] & (slots < TOP_K)[None, :]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ids = tl.load(ids_ptr + places, mask=mask, other=-1).to(tl.int32)
    weights = tl.load(weights_ptr + places, mask=mask, other=0.0)
    is_padding = ids < 0
    is_free = tl.sum((ids[:, :, None] == slots[None, None, :]).to(tl.int32), 1) == 0
    # The nth padding takes the nth free candidate. There are enough: each choice takes one at most.
    nth_free = tl.where(is_free, tl.cumsum(is_free.to(tl.int32), 1), 0)
    is_match = nth_free[:, None, :] == tl.cumsum(is_padding.to(tl.int32), 1)[:, :, None]
    candidates = tl.sum(tl.where(is_match, slots[None, None, :], 0), 2)
    tl.store(new_ids_ptr + places, tl.where(is_padding, candidates, ids), mask=mask)
    tl.store(new_weights_ptr + places, tl.where(is_padding, 0.0, weights), mask=mask)


def distinct_choices(topk: TopKOutput) -> TopKOutput:
    """The choices without -1: it becomes an expert that its token has not chosen, with the weight 0. For a
    library that keeps only the first of several choices of one expert."""
    ids, weights = topk.topk_ids.contiguous(), topk.topk_weights.contiguous()
    num_tokens, top_k = ids.shape
    found = TopKOutput(torch.empty_like(weights), torch.empty_like(ids, dtype=torch.int32))
    block_k = triton.next_power_of_2(top_k)
    block = max(1, 2048 // block_k**2)
    if num_tokens > 0:
        _distinct_kernel[(triton.cdiv(num_tokens, block),)](
            ids, weights, found.topk_ids, found.topk_weights, num_tokens,
            TOP_K=top_k, BLOCK=block, BLOCK_K=block_k, **pdl_options(ids),
        )  # fmt: skip
    return found
