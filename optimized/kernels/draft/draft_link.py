"""Parents -> links, depths and visibility between nodes: one CTA per tree.

Roofline bound: a launch. All nodes climb towards the root in the same loop, which runs as often as the tree
is deep. Children and siblings are minima over nodes with the same parent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=list(range(9)))
def _link_kernel(
    token_ids_ptr, parents_ptr, num_nodes_ptr, out_ids_ptr, out_parents_ptr, depths_ptr, next_token_ptr,
    next_sibling_ptr, visible_ptr, NUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    num_nodes = tl.load(num_nodes_ptr + request).to(tl.int32)
    first = request * NUM
    nodes = tl.arange(0, BLOCK)
    others = nodes[None, :]
    has_parent = (nodes > 0) & (nodes < num_nodes)
    parents = tl.load(parents_ptr + first + nodes, mask=has_parent, other=-1).to(tl.int32)
    # Parents come before their children. If not, climbing still ends, and no read is out of bounds.
    parents = tl.minimum(parents, nodes - 1)
    token_ids = tl.load(token_ids_ptr + first + nodes, mask=nodes < num_nodes, other=0)

    # --8<-- [start:climb-to-the-root]
    visible = others == nodes[:, None]
    depths = tl.zeros([BLOCK], dtype=tl.int32)
    ancestors = parents
    while tl.max(ancestors, axis=0) >= 0:
        visible |= others == ancestors[:, None]
        depths += (ancestors >= 0).to(tl.int32)
        above = tl.load(parents_ptr + first + ancestors, mask=ancestors > 0, other=-1).to(tl.int32)
        ancestors = tl.minimum(above, ancestors - 1)
    # --8<-- [end:climb-to-the-root]

    # [n, m]: m is a child of n; m is a later child of n's parent
    is_child = parents[None, :] == nodes[:, None]
    is_later = (parents[None, :] == parents[:, None]) & (others > nodes[:, None]) & has_parent[:, None]
    child = tl.min(tl.where(is_child, others, BLOCK), axis=1)
    sibling = tl.min(tl.where(is_later, others, BLOCK), axis=1)

    inside = nodes < NUM
    tl.store(out_ids_ptr + first + nodes, token_ids, mask=inside)
    tl.store(out_parents_ptr + first + nodes, parents.to(tl.int64), mask=inside)
    tl.store(depths_ptr + first + nodes, depths.to(tl.int64), mask=inside)
    tl.store(next_token_ptr + first + nodes, tl.where(child < BLOCK, child, -1).to(tl.int64), mask=inside)
    sibling = tl.where(sibling < BLOCK, sibling, -1)
    tl.store(next_sibling_ptr + first + nodes, sibling.to(tl.int64), mask=inside)
    entries = (first + nodes[:, None]) * NUM + others
    tl.store(visible_ptr + entries, visible.to(tl.uint8), mask=inside[:, None] & (others < NUM))


def link(
    token_ids: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[bs, N], [bs, N], [bs] -> token ids and parents with padding cleared, depths, next_token, next_sibling
    [bs, N] and visible [bs, N, N]."""
    bs, num = token_ids.shape
    assert token_ids.is_contiguous()
    assert parents.is_contiguous()
    numbers = torch.empty(5, bs, num, dtype=torch.int64, device=token_ids.device).unbind()
    visible = torch.empty(bs, num, num, dtype=torch.bool, device=token_ids.device)
    if bs > 0:
        _link_kernel[(bs,)](
            token_ids, parents, num_nodes, *numbers, visible.view(torch.uint8),
            NUM=num, BLOCK=triton.next_power_of_2(num), num_warps=4 if num > 16 else 1,
        )  # fmt: skip
    return numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], visible
