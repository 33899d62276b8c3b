"""The sum of the expert outputs of a token: one launch, in float32, in the order of choices.

Roofline bound: bytes, k + 1 rows of hidden a token (4096 tokens of 8 choices, hidden 2048, bfloat16: 151 MB,
36 us at 4.2 TB/s, less where they are still in the cache). For few tokens one launch.

Shape: a CTA takes all choices of one token for a tile of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import pdl_options, rounded

TILE_ELEMENTS = 8192


@triton.jit
def _combine_kernel(
    out_ptr, ids_ptr, y_ptr,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, BLOCK_J)[:, None]
    offs = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Outputs of padding pairs are uninitialized.
    has_expert = tl.load(ids_ptr + token * TOP_K + choices, mask=choices < TOP_K, other=-1) >= 0
    rows = out_ptr + (token * TOP_K + choices) * HIDDEN
    results = tl.load(rows + offs, mask=has_expert & (offs < HIDDEN), other=0.0).to(tl.float32)
    y = tl.sum(results, axis=0, keep_dims=True)
    tl.store(y_ptr + token * HIDDEN + offs, rounded(y, y_ptr.dtype.element_ty), mask=offs < HIDDEN)


def combine(out: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """out [num_tokens, k, hidden], topk_ids [num_tokens, k] -> [num_tokens, hidden]."""
    num_tokens, top_k, hidden = out.shape
    y = torch.empty(num_tokens, hidden, dtype=out.dtype, device=out.device)
    block_j = triton.next_power_of_2(top_k)
    block_n = min(triton.next_power_of_2(hidden), max(TILE_ELEMENTS // block_j, 128))
    _combine_kernel[(num_tokens, triton.cdiv(hidden, block_n))](
        out, topk_ids, y, TOP_K=top_k, HIDDEN=hidden, BLOCK_J=block_j, BLOCK_N=block_n, num_warps=4,
        **pdl_options(out),
    )  # fmt: skip
    return y
