"""The experts of this rank among those that tokens chose: replica, local number and load in one launch.

Roofline bound: the ids in and out: 4096 tokens of 8 experts are 131 KB each way, less than a microsecond. So
the bound is one launch.

Shape: a CTA takes a block of (token, choice) pairs. Loads are counted by atomic additions of integers, whose
sum does not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED, pdl_options
from diptych.shared.interfaces.expert_dispatch import Placement

BLOCK = 256


@triton.jit(do_not_specialize=["num_pairs", "first"])
def _local_kernel(
    ids_ptr, places_ptr, num_replicas_ptr, load_ptr, local_ptr, num_pairs, first,
    NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    is_real = ids >= 0
    replica = (pairs // TOP_K) % tl.load(num_replicas_ptr + ids, mask=is_real, other=1)
    local = tl.load(places_ptr + ids * MOST + replica, mask=is_real, other=-1) - first
    is_here = is_real & (local >= 0) & (local < NUM_LOCAL)
    tl.store(local_ptr + pairs, tl.where(is_here, local, -1).to(tl.int32), mask=pairs < num_pairs)
    tl.atomic_add(load_ptr + ids, tl.full([BLOCK], 1, tl.int64), mask=is_real, sem="relaxed")


def local_experts(topk_ids: torch.Tensor, placement: Placement, first: int, num_local: int) -> torch.Tensor:
    """topk_ids int32 [num_tokens, k], logical experts -> the same shape: `placement.choose` minus `first`, or
    -1 if that is no expert of the `num_local` from `first` on."""
    ids = topk_ids.contiguous()
    local = torch.empty_like(ids)
    places, num_pairs = placement.logical_to_physical, ids.numel()
    if num_pairs == 0:
        return local
    block = triton.next_power_of_2(num_pairs) if INTERPRETED else BLOCK
    _local_kernel[(triton.cdiv(num_pairs, block),)](
        ids, places, placement.num_replicas, placement.load, local, num_pairs, first, NUM_LOCAL=num_local,
        TOP_K=ids.shape[1], MOST=places.shape[1], BLOCK=block, num_warps=4, **pdl_options(ids),
    )  # fmt: skip
    return local
