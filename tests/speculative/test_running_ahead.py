"""Rounds launched before the one before is known: the order of things, memory, a device that is slow."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.overlap.future_runs import count_runs
from diptych.optimized.scheduler import Scheduler
from diptych.optimized.speculative.round import RoundInFlight
from diptych.shared import registry
from diptych.shared.tools.conformance.oracles import scheduler_harness
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.ledger_drafter import perfect
from diptych.shared.tools.conformance.oracles.scheduler_harness import (
    VOCAB_SIZE,
    SchedulerHarness,
    shape_flags,
)
from diptych.shared.tools.conformance.oracles.schedules import random_speculation, run_schedule
from diptych.shared.tools.conformance.whole_engine.switches import answers_alone, expect_answers
from diptych.shared.types import DraftShape
from tests.scheduler.late_streams import LateScheduler, UnsteadyScheduler, make_late
from tests.scheduler.test_overlap import Recording

PROMPT = [5, 7, 11]
SHAPE = DraftShape(3, 2, 8)


def harness_for(runs_ahead: bool = True, **options: Any) -> SchedulerHarness:
    return SchedulerHarness(
        replace={"scheduler": Scheduler},
        guess=perfect,
        runs_ahead=runs_ahead,
        pool_tokens=640,
        **shape_flags(SHAPE),
        **options,
    )


def test_a_round_is_launched_before_the_results_of_the_one_before_are_asked_for() -> None:
    harness = harness_for()
    streams = harness.scheduler.pipeline.streams = Recording()
    rid = harness.submit(PROMPT, 1 + 4 * 4)
    harness.run()
    harness.expect(rid, 17)
    expected = [("launch", 1)]
    for number in range(1, 6):  # that the fourth round ends it is not known when the fifth is launched
        expected += [("launch", number + 1), ("wait", number)]
    assert streams.events == [*expected, ("wait", 6)]


@pytest.mark.parametrize(
    "name",
    [
        "dflash:DFlashDrafter",
        "eagle:EagleDrafter",
        "ngram_lookup:NgramLookupDrafter",
        "standalone:StandaloneDrafter",
    ],
)
def test_the_drafters_of_this_panel_run_ahead(name: str) -> None:
    assert registry.load("drafter", f"diptych.optimized.speculative.{name}").runs_ahead


def test_runs_are_counted_without_their_padding() -> None:
    counts = torch.zeros(2, 4, dtype=torch.int32)
    count_runs(SimpleNamespace(output_counts=counts), torch.tensor([[0, 2, -1], [3, 3, 0]]))  # type: ignore[arg-type]
    assert counts.tolist() == [[1, 0, 1, 0], [1, 0, 0, 2]]


def test_others_are_waited_for() -> None:
    harness = harness_for(runs_ahead=False)
    streams = harness.scheduler.pipeline.streams = Recording()
    harness.submit(PROMPT, 17)
    harness.run()
    kinds = [kind for kind, _ in streams.events]
    assert kinds[:4] == ["launch", "wait", "launch", "wait"]
    assert ("launch", "launch") not in set(pairwise(kinds))


@pytest.mark.parametrize("page_size", [1, 4])
def test_between_steps_a_request_owns_what_two_rounds_may_need(page_size: int) -> None:
    harness = harness_for(page_size=page_size)
    rid = harness.submit(PROMPT, 60)
    req, decoding = harness.reqs[rid], harness.scheduler.decoding
    for _ in range(6):
        harness.step()
    while not req.finished:
        assert isinstance(harness.scheduler.pipeline.batches[-1], RoundInFlight)
        assert req.kv_committed_len == req.num_tokens - 1, "length on the CPU"
        surplus = req.kv_allocated_len - req.kv_committed_len
        assert decoding.num_slots <= surplus <= decoding.num_slots + decoding.max_kept
        harness.step()
    harness.expect(rid, 60)
    harness.expect_idle()


@pytest.mark.parametrize("first", [100, pytest.param(102, marks=pytest.mark.full)])
@pytest.mark.parametrize("impl", [LateScheduler, UnsteadyScheduler])
def test_any_schedule_on_a_slow_device(impl: type[Scheduler], first: int) -> None:
    """Raise the number to hunt."""
    for seed in range(first, first + 2):
        run_schedule(random_speculation(seed, True, True), {"scheduler": impl})


def test_a_chunk_is_followed_by_the_next_token_of_its_prompt() -> None:
    """Not by what is sampled behind it; also where that token's id is 0."""
    harness = harness_for(chunked_prefill_size=4)
    rid = harness.submit([0] * 14, 8)
    harness.run()
    harness.expect(rid, 8)


def two_rows_change_hands(impl: type[Scheduler]) -> SchedulerHarness:
    """Two requests end in the same round, which only the device knows when the next one is launched. Their
    rows go to two others, whose prompts are in the cache."""
    harness = SchedulerHarness(
        replace={"scheduler": impl},
        guess=perfect,
        runs_ahead=True,
        pool_tokens=640,
        max_running_requests=2,
        **shape_flags(SHAPE),
    )
    make_late(harness.scheduler)
    long_prompt = list(range(40))
    harness.submit(long_prompt, 2)
    harness.run()
    for prompt in ([41, 42, 43], [44, 45]):
        tokens = expected_tokens(prompt, 6, VOCAB_SIZE)
        assert tokens[5] not in tokens[:5]
        harness.submit(prompt, 40, eos=frozenset(tokens[5:]))
    for last in (50, 51):
        harness.submit([*long_prompt, last], 12)
    harness.run()
    return harness


def test_a_round_reads_the_rows_of_those_who_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = two_rows_change_hands(Scheduler)
    for rid, num_tokens in zip(harness.reqs, (2, 6, 6, 12, 12)):
        harness.expect(rid, num_tokens)
    monkeypatch.setattr(scheduler_harness, "num_rows", lambda config: config.max_running_requests + 1)
    with pytest.raises(AssertionError):
        two_rows_change_hands(Scheduler)


FLAGS: tuple[dict[str, Any], ...] = (
    {"page_size": 4},
    {"page_size": 16, "chunked_prefill_size": 16, "max_total_tokens": 320, "schedule_conservativeness": 0.01},
)


EAGLE3 = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
STANDALONE = {"speculative": "standalone", "speculative_draft_model": "tiny-dense"}


@pytest.mark.parametrize(
    ("drafts", "all_flags"),
    [
        (EAGLE3, FLAGS),
        pytest.param(STANDALONE, FLAGS[1:], marks=pytest.mark.full),
        pytest.param({**STANDALONE, "speculative_topk": 2}, FLAGS, marks=pytest.mark.full),
    ],
    ids=["eagle3", "standalone", "standalone trees"],
)
@pytest.mark.full
def test_answers_of_a_model_are_the_references(
    drafts: dict[str, Any], all_flags: tuple[dict[str, Any], ...]
) -> None:
    alone = answers_alone("tiny-dense", device="cpu", panel="reference")
    for flags in all_flags:
        expect_answers(
            "tiny-dense",
            alone,
            device="cpu",
            panel="reference",
            use={"scheduler": "optimized", "drafter": "optimized"},
            **drafts,
            **flags,
        )
