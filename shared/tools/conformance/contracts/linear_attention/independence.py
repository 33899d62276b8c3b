"""A clause of linear attention for deterministic mode: bits do not depend on the steps."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import LinearAttention
from diptych.shared.tools.conformance.clauses.case import table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.oracles.linear_batches import LAYER, LinearCase, world_of


def results(impl: type[LinearAttention], case: LinearCase) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each request the outputs of its tokens, and the state of its row after the last step."""
    world = world_of(case)
    backend, found = impl(world.pool), [[] for _ in world.sequences]  # type: ignore[var-annotated]
    for step in range(len(case.steps)):
        for i, output in world.step(backend, step).items():
            found[i].append(output)
    states = [world.pool.recurrent[LAYER, row].clone() for row in world.rows]
    return [torch.cat(outputs) for outputs in found], states


@contract(
    "A deterministic implementation gives the same bits however the tokens of a request are divided into "
    "steps, and whatever else is in them: outputs and states of prompts, chunks, decoding requests, and "
    "accepted drafts.",
    table(
        "steps verify dtype",
        ("chunks", ((66, 0, 3), (5, 1, 1), (1, 9, 1), (0, 2, 1)), (), torch.float32),
        ("token by token", ((1, 2), (1, 1), (1, 0), (1, 1)), (), torch.float32),
        ("drafts", ((5, 3), (3, 1), (1, 4), (2, 1), (1, 1)), (1, 2, 3), torch.float32),
        ("drafts, bfloat16", ((5,), (3,), (2,), (1,)), (1, 2), torch.bfloat16),
        of=LinearCase,
    ),
)
def independent_steps(impl: type[LinearAttention], case: LinearCase) -> None:
    if not impl.is_deterministic:
        return
    outputs, states = results(impl, case)
    totals = tuple(map(sum, zip(*case.steps)))
    # Pools that hold drafts have verify steps: there the last token is one that stays of a few drafts.
    before = tuple(n - 1 for n in totals)
    whole = case.replace(steps=(before, (1,) * len(totals)), verify=(1,)) if case.verify else None
    expected, last_states = results(impl, whole or case.replace(steps=(totals,)))
    for i, (output, state) in enumerate(zip(outputs, states)):
        expect_equal(f"outputs of request {i}", output, expected[i])
        if whole is None:
            expect_equal(f"state of request {i}", state, last_states[i])
