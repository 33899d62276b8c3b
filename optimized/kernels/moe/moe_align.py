"""Sorts the (token, choice) pairs by expert, into blocks of one expert each.

Roofline bound: num_pairs ids in, num_pairs and a few numbers out: 4096 tokens of 8 experts are 131 KB each
way. So the bound is a launch, or two; nothing waits for a count to reach the CPU.

Shape: no atomics, so that the same ids give the same blocks, always. A CTA puts one expert's pairs, of
one chunk of all pairs, in their places, in order. For that it needs to know how many pairs every expert has
(where its blocks begin) and how many the chunks before its own hold. If there is one chunk it counts them
all by itself (a histogram; the ids come from the cache); if there are more, a launch before it counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import pdl_options

MAX_PAIRS_AT_ONCE = 2048
"""Up to so many, one launch."""
CHUNK = 4096
"""Of more pairs, a CTA has so many."""


class Blocks(NamedTuple):
    """Block b is rows [b * block_size, (b + 1) * block_size) of `pairs`, all of expert `experts[b]`."""

    pairs: torch.Tensor  # int32 [max_blocks * block_size]: token * k + choice; num_pairs where there is none
    experts: torch.Tensor  # int32 [max_blocks], undefined beyond `num_blocks`
    num_blocks: torch.Tensor  # int32 [1]


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids_ptr, counts_ptr, num_pairs, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr
):  # fmt: skip
    expert, chunk = tl.program_id(0), tl.program_id(1)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    tl.store(counts_ptr + chunk * BLOCK_E + expert, tl.sum((ids == expert).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    ids_ptr, counts_ptr, pairs_ptr, experts_ptr, num_blocks_ptr, num_pairs,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    expert, chunk = tl.program_id(0), tl.program_id(1)
    experts, chunks = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)[:, None]
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    if BLOCK_C == 1:
        counts = tl.histogram(tl.where(ids < 0, EXPERTS, ids), BLOCK_E)  # padding in one extra bin
        num_before = 0
    else:
        mask = (chunks < tl.num_programs(1)) & (experts < EXPERTS)[None, :]
        counts = tl.load(counts_ptr + chunks * BLOCK_E + experts[None, :], mask=mask, other=0)
        is_before = (chunks < chunk) & (experts == expert)[None, :]
        num_before = tl.sum(tl.sum(tl.where(is_before, counts, 0), axis=1), axis=0)
        counts = tl.sum(counts, axis=0)
    num_blocks = tl.where(experts < EXPERTS, tl.cdiv(counts, BLOCK_SIZE), 0)
    first_block = tl.sum(tl.where(experts < expert, num_blocks, 0), axis=0)
    own_pairs = pairs_ptr + first_block * BLOCK_SIZE

    is_expert = (ids == expert).to(tl.int32)
    places = num_before + tl.cumsum(is_expert, axis=0) - 1
    tl.store(own_pairs + places, pairs, mask=is_expert != 0)

    if chunk == 0:
        own_blocks = tl.sum(tl.where(experts == expert, num_blocks, 0), axis=0)
        num_own = tl.sum(tl.where(experts == expert, counts, 0), axis=0)
        rest = num_own + tl.arange(0, BLOCK_SIZE)
        tl.store(own_pairs + rest, num_pairs, mask=rest < own_blocks * BLOCK_SIZE)
        for start in range(0, own_blocks, 32):
            blocks = start + tl.arange(0, 32)
            tl.store(experts_ptr + first_block + blocks, expert, mask=blocks < own_blocks)
        if expert == 0:
            tl.store(num_blocks_ptr, tl.sum(num_blocks, axis=0))


def align(
    topk_ids: torch.Tensor, num_experts: int, block_size: int, out: torch.Tensor | None = None
) -> Blocks:
    """topk_ids int32 [num_tokens, k], -1 for padding. `out`: the memory of the result, if its address must
    not change: `num_ints` of int32."""
    num_pairs = topk_ids.numel()
    assert num_pairs > 0
    assert topk_ids.is_contiguous()
    max_blocks = max_num_blocks(num_pairs, num_experts, block_size)
    num = num_ints(num_pairs, num_experts, block_size)
    numbers = torch.empty(num, dtype=torch.int32, device=topk_ids.device) if out is None else out
    blocks = Blocks(*numbers.split([max_blocks * block_size, max_blocks, 1]))
    block_e = triton.next_power_of_2(num_experts + 1)
    counts, chunk, num_chunks = topk_ids, triton.next_power_of_2(num_pairs), 1
    if num_pairs > MAX_PAIRS_AT_ONCE:
        chunk, num_chunks = CHUNK, triton.cdiv(num_pairs, CHUNK)
        counts = torch.empty(num_chunks, block_e, dtype=torch.int32, device=topk_ids.device)
        _count_kernel[(num_experts, num_chunks)](
            topk_ids, counts, num_pairs, BLOCK_E=block_e, CHUNK=chunk, num_warps=4, **pdl_options(topk_ids)
        )
    _place_kernel[(num_experts, num_chunks)](
        topk_ids, counts, *blocks, num_pairs, EXPERTS=num_experts, BLOCK_E=block_e, BLOCK_SIZE=block_size,
        CHUNK=chunk, BLOCK_C=1 if counts is topk_ids else triton.next_power_of_2(max(num_chunks, 2)),
        num_warps=4 if chunk <= 1024 else 8, **pdl_options(topk_ids),
    )  # fmt: skip
    return blocks


def num_ints(num_pairs: int, num_experts: int, block_size: int) -> int:
    """The number of int32 of the Blocks of `num_pairs` pairs."""
    return max_num_blocks(num_pairs, num_experts, block_size) * (block_size + 1) + 1


def max_num_blocks(num_pairs: int, num_experts: int, block_size: int) -> int:
    """The maximum number of blocks for any routing: every expert with pairs can have one partial block."""
    num_used = min(num_pairs, num_experts)
    return (num_pairs + num_used * (block_size - 1)) // block_size
