"""Draft trees in a few small kernels.

Differs from reference: choosing, linking and accepting are one launch each, with one CTA for every request,
and nothing waits for the device, so that all of it can be captured in a CUDA graph. Drafts are chosen without
sorting; the walk compares all nodes in parallel instead of following links. Needs Triton, and refuses trees
of more than 128 nodes. Loses on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.optimized.kernels.draft.draft_accept import accept_walk
from diptych.optimized.kernels.draft.draft_beam_step import best_beams
from diptych.optimized.kernels.draft.draft_link import link
from diptych.optimized.kernels.draft.draft_select import select_nodes
from diptych.optimized.kernels.sampling.top_tokens import top_tokens
from diptych.shared.interfaces import draft_tree as contract
from diptych.shared.types import Accepted, Beams, DraftTree, TopTokens

MAX_NODES = 128
"""A tree's N x N matrices lie in registers."""


class DraftTreeOps(contract.DraftTreeOps):
    def top_tokens(self, logits: torch.Tensor, k: int) -> TopTokens:
        contract.check_top_k(k, logits.shape[-1])
        return TopTokens(*top_tokens(logits, k))

    def first_beams(self, top: TopTokens) -> Beams:
        parents = torch.zeros_like(top.token_ids)
        indices = parents + torch.arange(parents.shape[1], device=parents.device)
        return Beams(top.token_ids, top.probs, parents, indices, top.token_ids, top.probs)

    def next_beams(self, beams: Beams, top: TopTokens) -> Beams:
        candidate_ids = top.token_ids.flatten(1)  # [bs, K * K]
        ids, probs, parents, indices, candidate_scores = best_beams(beams.scores, top.probs, candidate_ids)
        return Beams(ids, probs, parents, indices, candidate_ids, candidate_scores)

    def build(self, root_ids: torch.Tensor, steps: Sequence[Beams], num_draft_tokens: int) -> DraftTree:
        contract.check_num_draft_tokens(num_draft_tokens)
        scores = torch.cat([step.candidate_scores for step in steps], dim=1)
        token_ids = torch.cat([step.candidate_ids for step in steps], dim=1)
        beam_indices = torch.stack([step.indices for step in steps], dim=1)
        return self.from_parents(*select_nodes(root_ids, scores, token_ids, beam_indices, num_draft_tokens))

    def from_parents(
        self, token_ids: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor
    ) -> DraftTree:
        if token_ids.shape[1] > MAX_NODES:
            raise ValueError(f"{token_ids.shape[1]} draft tokens: the optimized panel takes {MAX_NODES}")
        return DraftTree(*link(token_ids, parents, num_nodes), num_nodes)

    def accept(self, tree: DraftTree, target_ids: torch.Tensor, max_depth: int | None = None) -> Accepted:
        max_depth = tree.num_draft_tokens - 1 if max_depth is None else max_depth
        return Accepted(*accept_walk(tree.token_ids, tree.parents, target_ids, max_depth))
