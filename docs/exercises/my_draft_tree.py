"""Stage 10, speculative decoding: complete the functions that raise NotImplementedError.

diptych course grade 10     # in the folder of `diptych course start`
diptych check --stage 10 my_draft_tree.py

The contract is in shared/interfaces/draft_tree.py, and the fields of a tree in shared/types/draft_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from diptych.shared.interfaces import draft_tree as contract
from diptych.shared.sampling.logprobs import sort_descending
from diptych.shared.types import Accepted, Beams, DraftTree, TopTokens


class DraftTreeOps(contract.DraftTreeOps):
    def top_tokens(self, logits: torch.Tensor, k: int) -> TopTokens:
        """logits [bs, ..., vocab_size] -> TopTokens(probs, token_ids), [bs, ..., k] each. A row whose softmax
        is NaN (a NaN, +inf, or nothing above -inf): ids 0..k-1, probability 0."""
        raise NotImplementedError("TODO candidates: what the drafter thinks is likely, and how likely")

    def first_beams(self, top: TopTokens) -> Beams:
        """The beams of the first step: each candidate of the root is a beam."""
        raise NotImplementedError("TODO candidates: where a tree begins")

    def next_beams(self, beams: Beams, top: TopTokens) -> Beams:
        """top: the K candidates of each of K beams, numbered beam * K + rank. A candidate's score is the
        probability of its whole path. K of them become the next beams."""
        raise NotImplementedError("TODO candidates: which candidates of all beams go on")

    def build(self, root_ids: torch.Tensor, steps: Sequence[Beams], num_draft_tokens: int) -> DraftTree:
        """N - 1 candidates of any step become nodes, and the root is node 0. `candidate_parents(steps)` gives
        the number of each candidate's parent; `from_parents` needs the index of its node."""
        raise NotImplementedError("TODO tree: which candidates are worth a row of the verification")

    def from_parents(
        self, token_ids: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor
    ) -> DraftTree:
        """token_ids, parents [bs, N]; the first num_nodes of each row are nodes, the others padding. A parent
        has a smaller index than its children. Fields: shared/types/draft_tree.py."""
        raise NotImplementedError("TODO links: what each node attends to, and how to walk down from the root")

    def accept(self, tree: DraftTree, target_ids: torch.Tensor, max_depth: int | None = None) -> Accepted:
        """Use `_accepted(paths, tokens, tree, max_depth)`: node indices from the root, and the sample at
        each."""
        raise NotImplementedError("TODO acceptance: which drafts did the target confirm?")


def candidate_parents(steps: Sequence[Beams]) -> torch.Tensor:
    """[bs, number of candidates of all steps] int64: the number of each candidate's parent, -1: the root."""
    parents, start = [torch.full_like(steps[0].candidate_ids, -1)], 0
    for before, step in pairwise(steps):
        num_each = step.candidate_ids.shape[1] // before.indices.shape[1]
        parents.append((start + before.indices).repeat_interleave(num_each, dim=1))
        start += before.candidate_ids.shape[1]
    return torch.cat(parents, dim=1)


def _accepted(paths: list[list[int]], tokens: list[list[int]], tree: DraftTree, max_depth: int) -> Accepted:
    def padded(rows: list[list[int]]) -> torch.Tensor:
        rows = [row + [-1] * (max_depth + 1 - len(row)) for row in rows]
        return torch.tensor(rows, dtype=torch.int64).view(-1, max_depth + 1).to(tree.token_ids.device)

    num_accepted = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64)
    return Accepted(padded(paths), padded(tokens), num_accepted.to(tree.token_ids.device))
