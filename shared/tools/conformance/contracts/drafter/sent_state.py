"""The clause of drafters with KV about requests whose prompts another engine has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diptych.shared.interfaces import Drafter
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.contracts.drafter.drafting import (
    SETTINGS,
    Setting,
    answers,
    watched,
    world,
)
from diptych.shared.types import ForwardBatch, Req

Sent = dict[str, tuple[bytes, list[torch.Tensor]]]
"""By rid: the state, and the KV of the prompt by layer, keys and values."""


def sends(impl: type[Drafter], sent: Sent) -> type[Drafter]:
    """A drafter that sends what it has of each prompt."""

    class Sends(watched(impl)):  # type: ignore[misc]
        def extend(self, reqs: Sequence[Req], forward_batch: ForwardBatch, *rest: Any) -> None:
            super().extend(reqs, forward_batch, *rest)
            for req, num_left in left_of_prompts(reqs, forward_batch):
                if num_left == 0 and self.kv_pool is not None:
                    rows = [buffer[slots_of(self, req)] for buffer in buffers_of(self)]
                    sent[req.rid] = self.state_of(req), rows

    return Sends


def receives(impl: type[Drafter], sent: Sent) -> type[Drafter]:
    """A drafter that gets what another one has of each prompt, and computes none itself."""

    class Receives(watched(impl)):  # type: ignore[misc]
        def extend(self, reqs: Sequence[Req], forward_batch: ForwardBatch, *rest: Any) -> None:
            prompts = left_of_prompts(reqs, forward_batch)
            if not prompts:
                super().extend(reqs, forward_batch, *rest)
            for req, num_left in prompts:
                if num_left == 0:
                    state, rows = sent[req.rid]
                    for buffer, own in zip(buffers_of(self), rows):
                        buffer[slots_of(self, req)] = own
                    self.restore(req, state)

    return Receives


def left_of_prompts(reqs: Sequence[Req], forward_batch: ForwardBatch) -> list[tuple[Req, int]]:
    """The requests whose prompts the batch computes, and how many tokens are left of each. Batches of
    prompts have nothing else."""
    left = [len(req.origin_input_ids) - n for req, n in zip(reqs, forward_batch.seq_lens_cpu)]
    return [(req, num_left) for req, num_left in zip(reqs, left) if num_left >= 0]


def slots_of(drafter: Any, req: Req) -> torch.Tensor:
    slots: torch.Tensor = drafter.rows.req_to_token[req.req_pool_idx, : len(req.origin_input_ids)]
    return slots.long()


def buffers_of(drafter: Any) -> list[torch.Tensor]:
    pool = drafter.kv_pool
    return [buffer(i) for i in range(pool.num_layers) for buffer in (pool.k_buffer, pool.v_buffer)]


@contract(
    "With the KV and the `state_of` each prompt from another engine, which `restore` gets, it drafts what it "
    "drafts after the `extend` of these prompts.",
    tuple(
        setting
        for setting in SETTINGS
        if (setting.algorithm, setting.chunk) in {("standalone", 12), ("eagle3", 16), ("dflash", 12)}
    ),
)
def state_from_another_engine(impl: Any, case: Setting) -> None:
    sent: Sent = {}
    first = world(impl, case, wrap=lambda drafter: sends(drafter, sent))
    expected: Any = first.parts.drafter
    if expected.kv_pool is None:
        return  # the other engine sends nothing of it
    answers(first, case.max_new_tokens)
    second = world(impl, case, wrap=lambda drafter: receives(drafter, sent))
    answers(second, case.max_new_tokens)
    found: Any = second.parts.drafter
    expect_true("something was drafted", len(expected.branches) > 0)
    expect_equal("branches", sorted(found.branches), sorted(expected.branches))
