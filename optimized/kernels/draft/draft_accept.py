"""The accept walk from the root along the target's samples: one CTA per tree.

Roofline bound: a launch. The whole tree is in registers. At each depth all nodes are compared with the
expected child, instead of following links.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=list(range(6)))
def _accept_kernel(
    token_ids_ptr, parents_ptr, target_ids_ptr, node_indices_ptr, out_ids_ptr, num_accepted_ptr,
    NUM: tl.constexpr, MAX_DEPTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    inside = nodes < NUM
    token_ids = tl.load(token_ids_ptr + request * NUM + nodes, mask=inside, other=0)
    parents = tl.load(parents_ptr + request * NUM + nodes, mask=inside, other=-1).to(tl.int32)
    targets = tl.load(target_ids_ptr + request * NUM + nodes, mask=inside, other=-1)

    columns = tl.arange(0, BLOCK_D)
    target = tl.sum(tl.where(nodes == 0, targets, 0), axis=0)
    path = tl.where(columns == 0, 0, -1)
    ids = tl.where(columns == 0, target, -1)
    num_accepted = tl.zeros([], dtype=tl.int32)
    # --8<-- [start:ask-all-nodes]
    child = tl.min(tl.where((parents == 0) & (token_ids == target), nodes, BLOCK), axis=0)
    while (child < BLOCK) & (num_accepted < MAX_DEPTH):
        num_accepted += 1
        target = tl.sum(tl.where(nodes == child, targets, 0), axis=0)
        path = tl.where(columns == num_accepted, child, path)
        ids = tl.where(columns == num_accepted, target, ids)
        child = tl.min(tl.where((parents == child) & (token_ids == target), nodes, BLOCK), axis=0)
    # --8<-- [end:ask-all-nodes]
    out = request * (MAX_DEPTH + 1) + columns
    tl.store(node_indices_ptr + out, path.to(tl.int64), mask=columns <= MAX_DEPTH)
    tl.store(out_ids_ptr + out, ids, mask=columns <= MAX_DEPTH)
    tl.store(num_accepted_ptr + request, num_accepted.to(tl.int64))


def accept_walk(
    token_ids: torch.Tensor, parents: torch.Tensor, target_ids: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[bs, N] each -> the nodes on the path and the target's tokens there, [bs, max_depth + 1], -1 after the
    end of the path; and the number of drafts on it, [bs]."""
    bs, num = token_ids.shape
    assert target_ids.is_contiguous()
    node_indices, out_ids = torch.empty(2, bs, max_depth + 1, dtype=torch.int64, device=token_ids.device)
    num_accepted = torch.empty(bs, dtype=torch.int64, device=token_ids.device)
    if bs > 0:
        _accept_kernel[(bs,)](
            token_ids, parents, target_ids, node_indices, out_ids, num_accepted,
            NUM=num, MAX_DEPTH=max_depth, BLOCK=triton.next_power_of_2(num),
            BLOCK_D=triton.next_power_of_2(max_depth + 1), num_warps=1,
        )  # fmt: skip
    return node_indices, out_ids, num_accepted
