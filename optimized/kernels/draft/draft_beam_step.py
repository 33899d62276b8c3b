"""Scores of a drafting step's K * K candidates and the K best of them: one CTA for each request.

Roofline bound: a launch. A request has some hundred numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _beams_kernel(
    beam_scores_ptr, probs_ptr, candidate_ids_ptr, candidate_scores_ptr,
    token_ids_ptr, scores_ptr, parents_ptr, indices_ptr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    candidates = tl.arange(0, BLOCK)
    is_left = candidates < K * K
    first = request * K * K
    beam_scores = tl.load(beam_scores_ptr + request * K + candidates // K, mask=is_left, other=0.0)
    scores = beam_scores * tl.load(probs_ptr + first + candidates, mask=is_left, other=0.0)
    tl.store(candidate_scores_ptr + first + candidates, scores, mask=is_left)
    for j in range(K):
        best = tl.max(tl.where(is_left, scores, -1.0), axis=0)
        index = tl.min(tl.where(is_left & (scores == best), candidates, BLOCK), axis=0)
        tl.store(token_ids_ptr + request * K + j, tl.load(candidate_ids_ptr + first + index))
        tl.store(scores_ptr + request * K + j, best)
        tl.store(parents_ptr + request * K + j, (index // K).to(tl.int64))
        tl.store(indices_ptr + request * K + j, index.to(tl.int64))
        is_left &= candidates != index


def best_beams(
    beam_scores: torch.Tensor, probs: torch.Tensor, candidate_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """beam_scores [bs, K], probs and candidate_ids [bs, K, K] -> of the best: token ids, scores, parents and
    indices [bs, K]; and the scores of all, [bs, K * K]."""
    bs, k = beam_scores.shape
    assert beam_scores.is_contiguous()
    assert probs.is_contiguous()
    assert candidate_ids.is_contiguous()
    token_ids, parents, indices = torch.empty(3, bs, k, dtype=torch.int64, device=probs.device)
    scores, candidate_scores = torch.empty_like(beam_scores), torch.empty_like(probs).view(bs, k * k)
    if bs > 0:
        _beams_kernel[(bs,)](
            beam_scores, probs, candidate_ids, candidate_scores, token_ids, scores, parents, indices,
            K=k, BLOCK=triton.next_power_of_2(k * k), num_warps=1,
        )  # fmt: skip
    return token_ids, scores, parents, indices, candidate_scores
