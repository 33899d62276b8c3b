"""Clauses of block drafters, with a head of random weights: drafts are those of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_true
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.draft_models.forward import DraftSession
from diptych.shared.tools.conformance.contracts.drafter.drafting import (
    SETTINGS,
    Setting,
    answers,
    world,
)
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, Req

BLOCKS = tuple(setting for setting in SETTINGS if setting.algorithm == "dflash")


def read_anew(drafter: Any, ids: Sequence[int]) -> DraftSession:
    """The drafter's model, after the target's hidden states of a text."""
    session = ModelSession(drafter.parts.model)
    captured = dict.fromkeys(drafter.hidden_layers, torch.empty(0))
    session.hidden_states(session.forward_batch({0: ids}), captured)
    draft_session = DraftSession(drafter.model)
    draft_session.store(torch.cat([captured[layer] for layer in drafter.hidden_layers], dim=-1))
    return draft_session


def watch_rounds(impl: Any, case: Setting, check: Callable[[Any, Req, DraftTree, int], None]) -> None:
    """Call `check` for a request of each round: with the drafter, the request, the trees and its row."""
    assembly = world(impl, case)
    drafter: Any = assembly.parts.drafter
    draft = drafter.draft
    num_rounds = 0

    def checked(batch: DraftBatch, shape: DraftShape) -> DraftTree:
        nonlocal num_rounds
        tree: DraftTree = draft(batch, shape)
        row = num_rounds % len(batch.reqs)
        check(drafter, batch.reqs[row], tree, row)
        num_rounds += 1
        return tree

    drafter.draft = checked
    answers(assembly, case.max_new_tokens)
    expect_true("there were rounds", num_rounds > 4, num_rounds)


@contract(
    "A block drafter drafts what its model fills in behind the text: the newest token, then masks, each of "
    "which attends to all others, and the draft at a position is what the mask there gives.",
    BLOCKS,
)
def block_drafts(impl: Any, case: Setting) -> None:
    if isinstance(impl, type):
        return  # one drafter, whatever its model

    def check(drafter: Any, req: Req, tree: DraftTree, row: int) -> None:
        *text, newest = req.all_ids
        hidden_states = read_anew(drafter, text).fill_in(newest, case.shape.num_steps)
        with torch.inference_mode():
            logits = drafter.model.compute_logits(hidden_states[1:])[:, : drafter.parts.num_token_ids]
        drafted = logits.gather(1, tree.token_ids[row, 1:, None])[:, 0]
        # A sum in another order decides a near tie.
        is_best = drafted >= logits.amax(dim=1) - 1e-3
        expect_true("drafts are the likeliest", bool(is_best.all()), is_best)

    watch_rounds(impl, case, check)


@contract(
    "Of what a block drafter drafted nothing stays: its KV of a text is that of the target's hidden states, "
    "for accepted tokens as for those of the prompt.",
    BLOCKS,
)
def block_features(impl: Any, case: Setting) -> None:
    if isinstance(impl, type):
        return

    def check(drafter: Any, req: Req, tree: DraftTree, row: int) -> None:
        num = req.num_tokens - 1
        slots = drafter.req_to_token_pool.read(req.req_pool_idx, 0, num)
        session = read_anew(drafter, req.all_ids[:-1])
        own = session.req_to_token_pool.read(session.req_pool_indices[0], 0, num)
        for layer_id in range(drafter.kv_pool.num_layers):
            for name in ("k_buffer", "v_buffer"):
                found, expected = (
                    getattr(pool, name)(layer_id) for pool in (drafter.kv_pool, session.kv_pool)
                )
                close = tolerance("logits", torch.float32)
                expect_close(f"{name} {layer_id}", found[slots], expected[own], close)

    watch_rounds(impl, case, check)
