"""The experts of this rank among those of gathered tokens, without padding rows, in one launch.

Roofline bound: ids and weights in and out: 512 tokens of 8 experts are 33 KB each way, less than a
microsecond. So the bound is one launch.

Shape: a CTA takes a block of (token, choice) pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED, pdl_options
from diptych.shared.interfaces.moe import TopKOutput

BLOCK = 256


@triton.jit(do_not_specialize=["num_pairs", "rows", "first"])
def _gathered_kernel(
    weights_ptr, ids_ptr, counts_ptr, own_ptr, local_ptr, num_pairs, rows, first, stride,
    NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, HAS_PADDING: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exist = pairs < num_pairs
    row = pairs // TOP_K
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    is_real = exist
    if HAS_PADDING:
        is_real = exist & (row % rows < tl.load(counts_ptr + row // rows, mask=exist, other=0))
    places = row.to(tl.int64) * stride + pairs % TOP_K
    ids = tl.load(ids_ptr + places, mask=is_real, other=-1)
    local = ids - first
    is_here = (ids >= 0) & (local >= 0) & (local < NUM_LOCAL)
    tl.store(local_ptr + pairs, tl.where(is_here, local, -1), mask=exist)
    tl.store(own_ptr + pairs, tl.load(weights_ptr + places, mask=is_here, other=0.0), mask=exist)


def gathered_experts(
    weights: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor | None, first: int, num_local: int
) -> TopKOutput:
    """weights float32, ids int32 [num_tokens, k]: rows of one stride, of all ranks, each with as many.
    counts: how many of a rank's rows are tokens, the first ones; None: all. Returns contiguous ones: ids
    minus `first`; -1, with the weight 0, for padding rows and for experts that are not among the `num_local`
    from `first` on."""
    own, local = weights.new_empty(weights.shape), ids.new_empty(ids.shape)
    if ids.numel() == 0:
        return TopKOutput(own, local)
    rows = ids.shape[0] if counts is None else ids.shape[0] // counts.shape[0]
    assert weights.stride() == ids.stride()
    block = triton.next_power_of_2(ids.numel()) if INTERPRETED else BLOCK
    _gathered_kernel[(triton.cdiv(ids.numel(), block),)](
        weights, ids, ids if counts is None else counts, own, local, ids.numel(), rows, first, ids.stride(0),
        NUM_LOCAL=num_local, TOP_K=ids.shape[1], HAS_PADDING=counts is not None, BLOCK=block, num_warps=4,
        **pdl_options(ids),
    )  # fmt: skip
    return TopKOutput(own, local)
