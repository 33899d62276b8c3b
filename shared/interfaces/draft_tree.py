"""Contract of draft trees: choosing drafts, linking them, accepting what the target would have written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from diptych.shared.types.draft_tree import Accepted, Beams, DraftTree, TopTokens


class DraftTreeOps(ABC):
    """Drafting keeps K beams; all that was looked at is ranked again at the end, and the best N - 1 drafts
    become a tree below the root. The target computes logits for every node, a token is sampled at every
    node, and the walk from the root follows drafts that equal the samples.

    Stateless: the same arguments give the same result, and no argument is modified. Everywhere the larger
    score comes first, and of equal scores the lower index. Shapes depend on the shapes and Python numbers
    given, never on what tensors hold, so that an implementation need not wait for the device.
    """

    @abstractmethod
    def top_tokens(self, logits: torch.Tensor, k: int) -> TopTokens:
        """logits [n, V] of any float type -> the k largest of each row, ties: lowest id first, and their
        probabilities, softmax in float32. A row whose softmax is not a number (a NaN, +inf, or nothing above
        -inf) gets the ids 0 .. k-1 with probability 0. Raises `ValueError` unless 1 <= k <= V."""

    @abstractmethod
    def first_beams(self, top: TopTokens) -> Beams:
        """top [bs, K]: after the root of each request. Each candidate is a beam."""

    @abstractmethod
    def next_beams(self, beams: Beams, top: TopTokens) -> Beams:
        """top [bs, K, K]: after each beam. A candidate's score is its beam's times its probability; the best
        K of all K * K go on, best first."""

    @abstractmethod
    def build(self, root_ids: torch.Tensor, steps: Sequence[Beams], num_draft_tokens: int) -> DraftTree:
        """Trees of N = num_draft_tokens nodes: the root root_ids [bs] and the best N - 1 of all candidates of
        all steps. Candidates are numbered step after step; chosen ones become nodes 1, 2, ... in ascending
        order of their numbers. No candidate is likelier than its parent, which has a lower number: so no node
        is chosen without its parent, also where both have the same score. Fewer candidates than N - 1: all of
        them, and padding. Raises `ValueError` unless num_draft_tokens >= 1."""

    @abstractmethod
    def from_parents(
        self, token_ids: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor
    ) -> DraftTree:
        """Trees out of token_ids [bs, N] and parents [bs, N] int64 (lower than the child's own index; the
        root's is not looked at), num_nodes [bs] int64 in 1 .. N. What is given for padding is ignored."""

    @abstractmethod
    def accept(self, tree: DraftTree, target_ids: torch.Tensor, max_depth: int | None = None) -> Accepted:
        """target_ids [bs, N] int64: the token that the target's sampler gave at each node (-1 for none,
        equal to no draft). From the root on: the child whose token equals the sample at its parent is
        accepted (of several, the lowest), until there is none or max_depth (None: N - 1) are accepted. The
        sample at the last accepted node is the bonus token."""


def check_top_k(k: int, vocab_size: int) -> None:
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k is {k}: it must be at least 1 and at most the {vocab_size} tokens there are")


def check_num_draft_tokens(num_draft_tokens: int) -> None:
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}, but the root alone is one")
