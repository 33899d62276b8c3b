"""What a layer's window or chunks leave of the masks of draft trees.

In a tree the slots of siblings are between a token and its ancestors, so a window counts along the branch:
the position of a key is the number of keys in front of it that the token sees.

Roofline bound: a launch; the masks of 64 trees of 16 nodes have 16 KB. Shape: a CTA per token reads its row
of the mask, numbers what it sees, and writes the row and the first position that the layer lets it see.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["window", "chunk"])
def _tree_window_kernel(
    mask_ptr, seq_lens_ptr, firsts_ptr, out_ptr, window, chunk,
    NUM_QUERIES: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tail_start = tl.load(seq_lens_ptr + row // NUM_QUERIES).to(tl.int32) - TAIL
    columns = tl.arange(0, BLOCK)
    is_key = (columns < TAIL) & (tail_start + columns >= 0)
    sees = tl.load(mask_ptr + row * TAIL + columns, mask=is_key, other=0) != 0
    # --8<-- [start:along-the-branch]
    positions = tl.maximum(tail_start, 0) + tl.cumsum(sees.to(tl.int32), axis=0) - 1
    own = tl.maximum(tail_start, 0) + tl.sum(sees.to(tl.int32), axis=0) - 1
    first = tl.maximum(tl.where(window >= 0, own - window, own // chunk * chunk), 0)
    tl.store(firsts_ptr + row, first)
    sees = sees & (positions >= first)
    # --8<-- [end:along-the-branch]
    tl.store(out_ptr + row * TAIL + columns, sees.to(tl.uint8), mask=columns < TAIL)


def tree_window(
    tree_mask: torch.Tensor, seq_lens: torch.Tensor, sliding_window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """tree_mask bool [bs, n, m], as in ForwardBatch. sliding_window: as of `window_of`, not -1 -> the first
    position that each token sees, int32 [bs, n], and the mask with the window, uint8 [bs, n, m]."""
    assert sliding_window != -1
    assert tree_mask.is_contiguous()
    num_requests, num_queries, tail = tree_mask.shape
    firsts = torch.empty(num_requests, num_queries, dtype=torch.int32, device=tree_mask.device)
    mask = torch.empty(tree_mask.shape, dtype=torch.uint8, device=tree_mask.device)
    if firsts.numel() > 0:
        _tree_window_kernel[(firsts.numel(),)](
            tree_mask.view(torch.uint8), seq_lens, firsts, mask, sliding_window, max(-sliding_window, 1),
            NUM_QUERIES=num_queries, TAIL=tail, BLOCK=triton.next_power_of_2(tail), num_warps=1,
        )  # fmt: skip
    return firsts, mask
