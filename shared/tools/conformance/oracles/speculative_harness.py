"""Helpers of the clauses about speculation: schedulers with the ledger drafter."""

from __future__ import annotations

from typing import Any

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.oracles.ledger_drafter import Guess
from diptych.shared.tools.conformance.oracles.scheduler_harness import SchedulerHarness, shape_flags
from diptych.shared.types import DraftShape

PROMPT = [5, 7, 11, 13, 17, 19, 23]
CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(5, 2, 11)


def shape_of(num_steps: int, top_k: int, num_draft_tokens: int) -> DraftShape:
    """A draft shape with at most `num_draft_tokens` nodes; for a chain the number follows from its depth."""
    most = DraftShape(num_steps, top_k, 0).max_nodes
    return DraftShape(num_steps, top_k, most if top_k == 1 else min(num_draft_tokens, most))


def harness_for(
    impl: type[Scheduler], guess: Guess, shape: DraftShape, **options: Any
) -> SchedulerHarness | None:
    """A harness with speculation; None if the scheduler refuses to speculate."""
    try:
        return SchedulerHarness(
            replace={"scheduler": impl}, guess=guess, **{"pool_tokens": 640, **options, **shape_flags(shape)}
        )
    except ValueError:
        return None
