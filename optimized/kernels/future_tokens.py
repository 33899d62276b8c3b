"""Token ids for the names of tokens that were not known when a batch was formed, in one launch.

Floor: some 2 microseconds of a kernel that does next to nothing. As single operations (negate, clamp, index,
compare, select) the same takes five of them, between two steps of the model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit(do_not_specialize=["num_ids"])
def _tokens_kernel(ids, ring, tokens, num_ids, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_id = i < num_ids
    id = tl.load(ids + i, mask=is_id, other=0)
    token = tl.load(ring - id, mask=is_id & (id < 0), other=0)
    tl.store(tokens + i, tl.where(id < 0, tl.maximum(token, 0), id), mask=is_id)


def tokens_of(ids: torch.Tensor, ring: torch.Tensor) -> torch.Tensor:
    """int64 ids, those below zero being the negatives of places in the int64 ring: with what is there in
    place of these, or 0 where that is no token (below zero)."""
    tokens = torch.empty_like(ids)
    num_ids = ids.shape[0]
    _tokens_kernel[(triton.cdiv(num_ids, BLOCK),)](ids, ring, tokens, num_ids, BLOCK=BLOCK, num_warps=1)
    return tokens
