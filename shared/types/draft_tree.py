"""Drafted tokens: candidates while drafting (Beams), trees for verification (DraftTree), and the accepted
path (Accepted)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class TopTokens(NamedTuple):
    """The k likeliest next tokens of each row of a draft model's logits."""

    probs: torch.Tensor  # [..., k] float32 in [0, 1], descending, never NaN
    token_ids: torch.Tensor  # [..., k] int64, distinct in each row


class Beams(NamedTuple):
    """One drafting step of bs requests: the K drafts that the next step extends, and the candidates from
    which they were chosen.

    Candidates of the first step: the K likeliest tokens after the root. Candidate a * K + c of a later step:
    the c-th likeliest token after beam a of the step before.
    """

    token_ids: torch.Tensor  # [bs, K] int64
    scores: torch.Tensor  # [bs, K] float32: product of the probabilities from the root on
    parents: torch.Tensor  # [bs, K] int64, the beam of the previous step that each extends; first step: 0
    indices: torch.Tensor  # [bs, K] int64, the candidate's number
    candidate_ids: torch.Tensor  # [bs, num_candidates] int64; first step: K of them, later: K * K
    candidate_scores: torch.Tensor  # [bs, num_candidates] float32


@dataclass(frozen=True)
class DraftTree:
    """bs trees of N nodes each, on the model's device.

    Node 0 is the root: the request's newest token, which has no KV yet. A parent's index is smaller than its
    children's. Nodes from num_nodes on are padding: token 0, no parent, depth 0, no links, visible
    to themselves only, never accepted.
    """

    token_ids: torch.Tensor  # [bs, N] int64
    parents: torch.Tensor  # [bs, N] int64, -1: the root
    depths: torch.Tensor  # [bs, N] int64; position = number of tokens with KV before this step + depth
    next_token: torch.Tensor  # [bs, N] int64, first child, -1: none
    next_sibling: torch.Tensor  # [bs, N] int64, the parent's next child in ascending order, -1: none
    visible: torch.Tensor  # [bs, N, N] bool, [b, n, m]: m is n or an ancestor of n
    num_nodes: torch.Tensor  # [bs] int64, at least 1

    def __post_init__(self) -> None:
        bs, num = self.token_ids.shape
        for name in ("parents", "depths", "next_token", "next_sibling"):
            assert getattr(self, name).shape == (bs, num), f"{name}: {tuple(getattr(self, name).shape)}"
        assert self.visible.shape == (bs, num, num)
        assert self.num_nodes.shape == (bs,)

    @property
    def batch_size(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_draft_tokens(self) -> int:
        """N: nodes of each tree, the root and padding included."""
        return self.token_ids.shape[1]

    def positions(self, prefix_lens: torch.Tensor) -> torch.Tensor:
        """[bs * N] int64; prefix_lens [bs]: tokens with KV before this step. Also what the sampler gets."""
        return (prefix_lens[:, None] + self.depths).flatten()


class Accepted(NamedTuple):
    """The accepted path from the root, and the tokens that the target sampled along it.

    Column j of `node_indices` is the path's node at depth j; column j of `token_ids` is what the target
    sampled there. The first num_accepted + 1 columns of `node_indices` are the nodes whose KV is kept; those
    of `token_ids` are the new output tokens: the accepted drafts, then the bonus token. The rest is -1.
    """

    node_indices: torch.Tensor  # [bs, max_depth + 1] int64, column 0 is the root
    token_ids: torch.Tensor  # [bs, max_depth + 1] int64
    num_accepted: torch.Tensor  # [bs] int64, accepted drafts, without the root and the bonus token
