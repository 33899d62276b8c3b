"""Rows sorted by expert for the libraries' grouped GEMMs, and the weighted sum of their results.

Roofline bound: of the order, a few bytes a pair of token and expert, so a launch each; of the sum, k + 1 rows
of hidden a token.

Shape: `moe_align` sorts without atomics, so the same choices give the same rows, always. Nothing waits for a
count to reach the CPU, and shapes follow from the number of tokens alone: a CUDA graph can hold all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from optimized.kernels.moe_align import align
from optimized.kernels.portable import pdl_options, rounded
from shared.interfaces.moe import TopKOutput

BLOCK_ROWS = 128
TILE_ELEMENTS = 8192


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


def scatter_rows(values: torch.Tensor, slots: torch.Tensor, num_rows: int) -> torch.Tensor:
    """values [num_tokens or num_pairs, size], 8 bits or float32 -> [num_rows + 1, size]: each value in the
    rows of its pairs. The other rows are uninitialized; the last takes the pairs without an expert."""
    out = torch.empty(num_rows + 1, values.shape[1], dtype=values.dtype, device=values.device)
    bits = torch.uint8 if values.element_size() == 1 else torch.float32
    by_pair = values.view(bits).view(slots.shape[0], -1, values.shape[1])
    out.view(bits)[slots] = by_pair
    return out


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
