"""Data between the scheduler and a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from diptych.shared.types.req import Req


class DraftShape(NamedTuple):
    """How much to draft: a tree's depth, its width while drafting, and its nodes."""

    num_steps: int  # the deepest draft; at least 1
    top_k: int  # beams kept at each step; 1: a chain
    num_draft_tokens: int  # N: nodes of the tree that is verified, the root included

    @property
    def max_nodes(self) -> int:
        """All candidates of a draft, the root included: the most nodes of a tree."""
        return 1 + self.top_k + (self.num_steps - 1) * self.top_k**2


@dataclass(frozen=True)
class DraftBatch:
    """Requests to draft for, in the order of their trees; tensors on the target's device.

    Request i has n = seq_lens[i] tokens with KV, in the target's pool and in the drafter's. Its newest token,
    root_ids[i], is at position n and has no KV. slots[i] are `req_to_token[row, n : n + num_slots]`, which
    only this request owns. The drafter may use them until `draft` returns; then the target uses them.

    For a drafter that runs ahead, `seq_lens_cpu` are upper bounds. It writes to `slots` as given here: the
    device may execute a batch after a request of it has ended.
    """

    reqs: list[Req]
    root_ids: torch.Tensor  # [bs] int64
    req_pool_indices: torch.Tensor  # [bs] int64, rows of req_to_token
    seq_lens: torch.Tensor  # [bs] int64
    seq_lens_cpu: tuple[int, ...]
    slots: torch.Tensor  # [bs, num_slots] int64

    @property
    def num_slots(self) -> int:
        return self.slots.shape[1]

    @property
    def batch_size(self) -> int:
        return len(self.reqs)
