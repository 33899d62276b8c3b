"""The best candidates of all drafting steps, as nodes below a root: one CTA per request.

Roofline bound: a launch. Nothing is sorted. Scores are not negative, so their bits have the same order. The
bits of the lowest score that is selected are found one by one, from the highest on, by counting the
candidates that reach it. Of candidates that tie with it the first are taken. A running sum over the selected
ones gives each its node.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _select_kernel(
    scores_ptr, candidate_ids_ptr, beam_indices_ptr, root_ids_ptr, token_ids_ptr, parents_ptr, num_nodes_ptr,
    num_candidates, K: tl.constexpr, NUM_STEPS: tl.constexpr, NUM_NODES: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    is_there = numbers < num_candidates
    scores = tl.load(scores_ptr + request * num_candidates + numbers, mask=is_there, other=0.0)
    bits = tl.where(is_there, scores.to(tl.int32, bitcast=True), -1)

    # --8<-- [start:find-the-bound]
    bound = tl.zeros([], dtype=tl.int32)  # the largest that NUM_CHOSEN candidates reach
    for place in range(31):
        higher = bound | (1 << (30 - place))
        num_reaching = tl.sum((bits >= higher).to(tl.int32), axis=0)
        bound = tl.where(num_reaching >= NUM_CHOSEN, higher, bound)
    ties = (bits == bound).to(tl.int32)
    num_above = tl.sum((bits > bound).to(tl.int32), axis=0)
    rank = num_above + tl.cumsum(ties, axis=0)  # of ties, from 1 on
    is_chosen = (bits > bound) | ((ties != 0) & (rank <= NUM_CHOSEN))
    nodes = tl.cumsum(is_chosen.to(tl.int32), axis=0)
    # --8<-- [end:find-the-bound]

    # Candidates of the first step hang from the root, K * K of each later one from the beams before.
    step = (numbers - K + K * K) // (K * K)
    beam = (numbers - K + K * K) % (K * K) // K
    has_parent = is_chosen & (numbers >= K)
    own_beams = beam_indices_ptr + request * NUM_STEPS * K
    index = tl.load(own_beams + (step - 1) * K + beam, mask=has_parent, other=0)
    parent_number = tl.where(step > 1, K + (step - 2) * K * K, 0) + index.to(tl.int32)
    parent_nodes = tl.gather(nodes, tl.where(has_parent, parent_number, 0), axis=0)
    parents = tl.where(has_parent, parent_nodes, 0).to(tl.int64)

    token_ids = tl.load(candidate_ids_ptr + request * num_candidates + numbers, mask=is_chosen, other=0)
    out = request * NUM_NODES
    tl.store(token_ids_ptr + out + nodes, token_ids, mask=is_chosen)
    tl.store(parents_ptr + out + nodes, parents, mask=is_chosen)
    tl.store(token_ids_ptr + out, tl.load(root_ids_ptr + request))
    tl.store(num_nodes_ptr + request, NUM_CHOSEN + 1)


def select_nodes(
    root_ids: torch.Tensor,
    candidate_scores: torch.Tensor,
    candidate_ids: torch.Tensor,
    beam_indices: torch.Tensor,
    num_draft_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """candidate_scores, candidate_ids [bs, num_candidates]; beam_indices [bs, steps, K] -> token ids and
    parents [bs, N], num_nodes [bs]. The root's parent and values of padding are undefined."""
    bs, num_candidates = candidate_scores.shape
    num_steps, k = beam_indices.shape[1:]
    assert num_candidates == k + (num_steps - 1) * k * k
    device = root_ids.device
    token_ids, parents = torch.empty(2, bs, num_draft_tokens, dtype=torch.int64, device=device)
    num_nodes = torch.empty(bs, dtype=torch.int64, device=device)
    if bs > 0:
        _select_kernel[(bs,)](
            candidate_scores, candidate_ids, beam_indices, root_ids, token_ids, parents, num_nodes,
            num_candidates, K=k, NUM_STEPS=num_steps, NUM_NODES=num_draft_tokens,
            NUM_CHOSEN=min(num_draft_tokens - 1, num_candidates),
            BLOCK=triton.next_power_of_2(num_candidates), num_warps=4,
        )  # fmt: skip
    return token_ids, parents, num_nodes
