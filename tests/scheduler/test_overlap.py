"""The overlapping scheduler beyond its contract: the order of things, the ring, and a device that is slow."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.optimized.graphs.rehearsal import prompts
from diptych.optimized.overlap.future_map import FutureMap, count_in_flight
from diptych.optimized.overlap.streams import OneStream, Pending, Work
from diptych.optimized.scheduler import Scheduler
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.invariants import InvariantViolation
from diptych.shared.tools.conformance.clauses.case import EXAMPLE
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.suite import clauses_of
from diptych.shared.tools.conformance.contracts.scheduler.faults import rows_change_hands
from diptych.shared.tools.conformance.contracts.scheduler.schedules import PROMPT
from diptych.shared.tools.conformance.oracles import scheduler_harness
from diptych.shared.tools.conformance.oracles.scheduler_harness import SchedulerHarness
from diptych.shared.tools.conformance.oracles.schedules import random_faults, random_schedule, run_schedule
from diptych.shared.tools.conformance.whole_engine.switches import answers_alone, expect_answers
from diptych.shared.types import ForwardMode, Req, SamplingParams
from tests.changed_modules import Change, changed
from tests.conformance.fast_cut import fast_clauses
from tests.properties import HealthCheck, given, settings, st

from .late_streams import LateScheduler, UnsteadyScheduler, make_late

RAISING = {
    "failing-forward",
    "fails-on-a-prompt",
    "failing-sampler",
    "failing-grammar",
    "fails-in-the-middle",
    "reports-before-it-fails",
    "failure-inside",
    "fails-after-a-nan-prompt",
    "replicas-in-threads",
}
"""A model raises when it is launched: on the late device nothing runs at that time."""

MANY = {
    "any-schedule",
    "any-schedule-of-any-requests",
    "any-schedule-of-drafts",
    "any-schedule-of-steps-together",
    "any-schedule-ahead",
    "any-shape",
    "any-moment",
    "any-faults",
}
"""Clauses of many cases: random ones are tried below, with seeds of their own."""


def cases_of(clauses: list[Clause]) -> list[tuple[Clause, Any]]:
    return [
        (clause, case) for clause in clauses if clause.name not in MANY | RAISING for case in clause.cases
    ]


FEW, ALL = cases_of(fast_clauses("scheduler")), cases_of(clauses_of("scheduler"))


def harness_for(impl: type[Scheduler] = Scheduler, **options: Any) -> SchedulerHarness:
    return SchedulerHarness(replace={"scheduler": impl}, **options)


# ---- order ----


class Recording(OneStream):
    """Records when a batch is launched and when its results are read."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.num_launches = 0

    def launch(self, work: Work) -> Pending:
        self.num_launches += 1
        number, pending = self.num_launches, super().launch(work)
        self.events.append(("launch", number))
        return Noting(self, number, pending)


class Noting(Pending):
    def __init__(self, streams: Recording, number: int, pending: Pending) -> None:
        self.streams, self.number, self.pending = streams, number, pending

    def wait(self) -> Any:
        self.streams.events.append(("wait", self.number))
        return self.pending.wait()


def test_a_batch_is_launched_before_the_results_of_the_one_before_are_asked_for() -> None:
    harness = harness_for()
    streams = harness.scheduler.pipeline.streams = Recording()
    harness.submit(PROMPT, 5)
    harness.run()
    expected = [("launch", 1)]
    for number in range(1, 5):
        expected += [("launch", number + 1), ("wait", number)]
    assert streams.events == [*expected, ("wait", 5)], "an end by length is known: no sixth batch"


def test_one_surplus_step_after_a_stop_token() -> None:
    harness = harness_for()
    rid = harness.submit(PROMPT, 20)
    harness.run()
    tokens, num_computed = harness.tokens[rid], harness.model_runner.num_computed_tokens
    assert tokens[3] not in tokens[:3]
    harness = harness_for()
    streams = harness.scheduler.pipeline.streams = Recording()
    rid = harness.submit(PROMPT, 20, eos=frozenset([tokens[3]]))
    harness.run()
    assert harness.tokens[rid] == tokens[:4]
    assert streams.num_launches == 5
    assert harness.model_runner.num_computed_tokens == num_computed - (20 - 5)
    assert not harness.scheduler.pipeline, "nothing runs without live requests"
    harness.expect_idle()


def test_an_interrupt_while_waiting_loses_nothing() -> None:
    class Interrupted(Noting):
        def wait(self) -> Any:
            if self.number == 3 and self.streams.events[-1] != ("interrupt", 3):
                self.streams.events.append(("interrupt", 3))
                raise KeyboardInterrupt
            return super().wait()

    class Interrupting(Recording):
        def launch(self, work: Work) -> Pending:
            noting = super().launch(work)
            return Interrupted(self, noting.number, noting.pending)

    harness = harness_for(is_spread=True)
    harness.scheduler.pipeline.streams = Interrupting()
    rids = [harness.submit(PROMPT, 8, frequency_penalty=1.0), harness.submit([3, 4], 6)]
    harness.step()
    harness.step()
    harness.step()
    with pytest.raises(KeyboardInterrupt):
        harness.step()
    assert len(harness.scheduler.pipeline) == 2
    harness.run()
    for rid in rids:
        harness.expect_what_it_gets_alone(rid)
    harness.expect_idle()


# ---- the ring ----


@settings(max_examples=200, derandomize=True)
@given(st.integers(1, 5), st.integers(0, 4), st.lists(st.integers(1, 5), max_size=60))
def test_places_of_two_batches_never_meet_and_no_batch_is_torn(
    max_batch_size: int, extra: int, sizes: list[int]
) -> None:
    ring = FutureMap(max_batch_size, torch.device("cpu"), limit=2 * max_batch_size + extra)
    last: range = range(0)
    for number, size in enumerate(sizes):
        size = min(size, max_batch_size)
        first = ring.take(size)
        places = range(first, first + size)
        assert places.start >= 1
        assert places.stop <= len(ring.token_ids)
        assert not set(places) & set(last)
        ring.store(first, torch.arange(size) + 100 * number)
        names = [ring.name_of(place) for place in places]
        assert max(names) < 0, "what is not below zero is an id"
        assert ring.token_ids[names].tolist() == [100 * number + i for i in range(size)]
        last = places


def test_only_tokens_in_flight_are_counted() -> None:
    """The CPU has counted its own tokens, token 0 as well."""
    named = replace(prompts([1, 1, 1], torch.device("cpu")), forward_mode=ForwardMode.DECODE)
    named = replace(named, input_ids=torch.tensor([-3, 0, 7]))
    resolved = replace(named, input_ids=torch.tensor([5, 0, 7]))
    params = SamplingParams(frequency_penalty=0.5)
    reqs = [Req("r", [1], params, seed=0, output_ids=[2]) for _ in range(3)]
    info = make_sampling_batch_info(reqs, 9, "cpu")
    before = info.output_counts.clone()
    count_in_flight(info, named, resolved)
    assert (info.output_counts - before).nonzero().tolist() == [[0, 5]]


def test_a_ring_too_small_for_two_batches_is_refused() -> None:
    with pytest.raises(AssertionError, match="7 places do not hold two of 4"):
        FutureMap(4, torch.device("cpu"), limit=7)


# ---- a slow device ----


@pytest.mark.parametrize(
    ("impl", "cases"),
    [
        pytest.param(LateScheduler, FEW[::8], id="late, every eighth case"),
        pytest.param(UnsteadyScheduler, FEW[2::8], id="unsteady, every eighth case"),
        pytest.param(LateScheduler, ALL, id="late, all cases", marks=pytest.mark.full),
        pytest.param(UnsteadyScheduler, ALL, id="unsteady, all cases", marks=pytest.mark.full),
    ],
)
def test_the_contract_holds_on_a_slow_device(impl: type[Scheduler], cases: list[Any]) -> None:
    for clause, case in cases:
        run(clause, impl, case)


def run(clause: Clause, impl: type[Scheduler], case: Any) -> None:
    try:
        clause.run(impl, case, None)
    except Exception as error:
        raise AssertionError(f"{clause.name}, {case.name}: {error}") from error


@pytest.mark.parametrize("first", [100, pytest.param(103, marks=pytest.mark.full)])
@pytest.mark.parametrize("impl", [LateScheduler, UnsteadyScheduler])
def test_any_schedule_on_a_slow_device(impl: type[Scheduler], first: int) -> None:
    for seed in range(first, first + 3):
        schedule = replace(random_schedule(seed, is_spread=True), num_continuous_decode_steps=1 + seed % 3)
        run_schedule(schedule, {"scheduler": impl})


@pytest.mark.parametrize("first", [100, pytest.param(106, marks=pytest.mark.full)])
@pytest.mark.parametrize("impl", [LateScheduler, UnsteadyScheduler])
def test_any_faults_on_a_slow_device(impl: type[Scheduler], first: int) -> None:
    for seed in range(first, first + 6):
        run_schedule(random_faults(seed), {"scheduler": impl})


def test_a_row_that_is_used_again_at_once_is_read_by_the_batch_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_harness, "num_rows", lambda config: config.max_running_requests + 1)
    with pytest.raises(AssertionError, match="a slot was read that was never written"):
        rows_change_hands.run(LateScheduler, EXAMPLE[0], None)


@settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from([Scheduler, UnsteadyScheduler]))
def test_any_schedule_of_any_requests(seed: int, impl: type[Scheduler]) -> None:
    """Raise max_examples and drop derandomize to hunt."""
    run_schedule(random_schedule(seed, is_spread=True), {"scheduler": impl})


def test_a_slow_device_shows_what_is_made_too_late() -> None:
    """Counts that are made when the batch runs: the CPU may have the token in flight by then."""
    make_info = "info = self.sampling_info(batch.reqs, num_in_flight)"
    start = "def forward_and_sample() -> Any:"
    before = f"            {make_info}\n\n            {start}\n"
    change = Change(
        "optimized.overlap.in_flight", before, f"            {start}\n                {make_info}\n"
    )

    class Late(changed("optimized.scheduler", change).Scheduler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            make_late(self, random.Random(1))

    def run_all() -> None:
        for seed in range(40):
            run_schedule(random_schedule(seed, is_spread=True), {"scheduler": Late})

    with pytest.raises((Mismatch, InvariantViolation)):
        run_all()


# ---- a model that answers ----

FLAGS: tuple[dict[str, Any], ...] = (
    {"chunked_prefill_size": 7, "enable_mixed_chunk": True, "max_running_requests": 4},
    {"max_total_tokens": 256, "schedule_conservativeness": 0.01, "page_size": 16},  # memory is short
)
OPTIMIZED = {"device": "cpu", "panel": "reference", "use": {"scheduler": "optimized"}}


def test_answers_of_a_model_are_the_references() -> None:
    alone = answers_alone("tiny-dense", device="cpu", panel="reference")
    for flags in FLAGS:
        expect_answers("tiny-dense", alone, **OPTIMIZED, **flags)
