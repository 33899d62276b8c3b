"""Runs, intervals and their figures on an engine whose every step takes a known time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from timed_engine import TimedEngine

from diptych.shared.tools.bench import latency, long_prompts, offline
from diptych.shared.tools.bench.drive import Sampling, run_to_end
from diptych.shared.tools.bench.itl import Interval, ItlMeter, percentile, summarize
from diptych.shared.tools.bench.latency import LatencyResult, Streams, run_streams
from diptych.shared.tools.bench.long_prompts import LongPromptsResult, Repeat, Window, run_window
from diptych.shared.tools.bench.offline import CaseResult
from diptych.shared.tools.bench.workloads import Case, LongPrompts, Request

SAMPLING = Sampling(0.6, 3)


def requests(*lens: tuple[int, int]) -> list[Request]:
    return [Request([i] * prompt_len, output_len) for i, (prompt_len, output_len) in enumerate(lens)]


# ---- one run ----


def test_a_run_counts_tokens_and_time() -> None:
    llm = TimedEngine()
    seen: list[int] = []
    run = run_to_end(llm, requests((100, 5), (300, 3)), SAMPLING, llm.clock, seen.append)  # type: ignore[arg-type]
    # Two prompts, then four steps: the second request leaves after two of them.
    assert run.total_time == pytest.approx(0.1 + 0.3 + 4 * 0.01)
    assert (run.num_output_tokens, run.num_prompt_tokens, run.num_steps) == (8, 400, 6)
    assert run.tokens_per_second == pytest.approx(8 / 0.44)
    assert run.time_to_first_token is None
    assert seen == [1, 2, 4, 6, 7, 8]
    assert llm.num_flushes == 1


def test_requests_take_the_adapters_in_turn() -> None:
    llm = TimedEngine()
    llm.assembly.lora = SimpleNamespace(by_name={"law": 1, "code": 2})
    run_to_end(llm, requests((10, 2), (10, 2), (10, 2)), SAMPLING, llm.clock)  # type: ignore[arg-type]
    assert llm.adapters == ["law", "code", "law"]


def test_a_single_request_has_a_first_token() -> None:
    llm = TimedEngine()
    run = run_to_end(llm, requests((100, 5)), SAMPLING, llm.clock)  # type: ignore[arg-type]
    assert run.time_to_first_token == pytest.approx(0.1)


def test_answers_that_are_too_short_are_an_error() -> None:
    llm = TimedEngine(longest=2)
    with pytest.raises(ValueError, match="r1 gave 2 tokens instead of 5"):
        run_to_end(llm, requests((10, 5)), SAMPLING, llm.clock)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    llm = TimedEngine()
    with pytest.raises(ValueError, match=r"9990 \+ 11 tokens, must fit into the context \(10000\)"):
        run_to_end(llm, requests((9990, 11)), SAMPLING, llm.clock)  # type: ignore[arg-type]
    run_to_end(llm, requests((9990, 10)), SAMPLING, llm.clock)  # type: ignore[arg-type]
    llm.submit([1], llm.submit([1], None)[0].params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="busy"):
        run_to_end(llm, requests((10, 5)), SAMPLING, llm.clock)  # type: ignore[arg-type]


def test_an_interrupt_leaves_the_engine_idle_and_the_complete_repeats() -> None:
    """A run has 1 + 4 steps; the third one, after the warm-up, is interrupted."""
    llm = TimedEngine(interrupt_at=13)
    result = CaseResult(Case("case", requests((10, 5))), "case")
    with pytest.raises(KeyboardInterrupt):
        offline.measure(llm, result, SAMPLING, clock=llm.clock)  # type: ignore[arg-type]
    assert len(result.runs) == 1
    assert (list(llm.waiting), llm.running) == ([], [])
    assert result.as_json()["tokens_per_s"]["median"] == pytest.approx(5 / 0.05)


def test_repeats_follow_a_warm_up_from_an_empty_cache_and_precede_the_timeline() -> None:
    llm = TimedEngine()
    names: list[tuple[str, int]] = []
    was_on: list[bool] = []

    def on_run(what: str, num_tokens: int) -> None:
        names.append((what, num_tokens))
        was_on.append(llm.timeline.is_on)

    result = CaseResult(Case("case", requests((10, 5), (10, 2))), "x")
    offline.measure(
        llm, result, SAMPLING, num_repeats=2, num_warm_ups=1, on_run=on_run, clock=llm.clock
    )  # type: ignore[arg-type]  # fmt: skip
    assert names == [("x: warm-up", 7), ("x: 1 of 2", 7), ("x: 2 of 2", 7), ("x: timeline", 7)]
    assert was_on == [False, False, False, True]
    assert (len(result.runs), llm.num_flushes) == (2, 4)
    assert result.recording is not None


# ---- intervals ----


@pytest.mark.parametrize("number", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_those_of_numpy(number: int, percent: float) -> None:
    values = list(np.random.default_rng(number).normal(size=number))
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="99"):
        percentile([], 99)


def test_intervals_are_from_output_to_output() -> None:
    llm = TimedEngine(tokens_a_step=2)
    collectors = [llm.submit([0] * n, params(9))[0] for n in (10, 20)]
    meter = ItlMeter(collectors)  # type: ignore[arg-type]
    start = llm.clock.now
    for _ in range(4):
        llm.step()
        meter.look(llm.clock.now)
        meter.look(llm.clock.now)  # nothing new: no interval
    intervals = [
        (round(interval.start - start, 6), round(interval.end - start, 6), interval.num_tokens)
        for interval in meter.intervals
    ]
    # First tokens at 0.01 and 0.03; then both at 0.04 and 0.05, two tokens each.
    assert intervals == [(0.01, 0.04, 2), (0.03, 0.04, 2), (0.04, 0.05, 2), (0.04, 0.05, 2)]
    assert [interval.start - start for interval in meter.steady_intervals()] == pytest.approx(
        [0.03, 0.04, 0.04]
    )


def test_steady_intervals_end_with_the_first_to_end() -> None:
    llm = TimedEngine()
    meter = ItlMeter([llm.submit([0] * 10, params(n))[0] for n in (3, 8)])  # type: ignore[misc]
    while llm.step():
        meter.look(llm.clock.now)
    assert len(meter.intervals) == 2 + 7
    assert len(meter.steady_intervals()) == 1 + 2  # the first one's first interval holds the other's prompt


def test_summary_of_intervals() -> None:
    spread = summarize([Interval(0, seconds, tokens) for seconds, tokens in ((1, 1), (2, 2), (3, 1), (6, 4))])
    assert spread == pytest.approx((4, 12 / 8, 2.5, 5.1, 5.91, 6))
    with pytest.raises(ValueError, match="no ITL"):
        summarize([])


def params(output_len: int) -> Any:
    from diptych.shared.types import SamplingParams

    return SamplingParams(max_new_tokens=output_len)


# ---- streams ----


def test_a_single_stream() -> None:
    llm = TimedEngine()
    streams = Streams(1, 100, 11)
    run = run_streams(llm, streams, streams.requests(1000), llm.clock)  # type: ignore[arg-type]
    assert run.times_to_first_token == pytest.approx([0.1])
    assert len(run.intervals) == 10
    assert run.itl.per_token == pytest.approx(0.01)
    assert run.total_time == pytest.approx(0.1 + 10 * 0.01)


def test_streams_at_once_are_compared_while_all_decode() -> None:
    """The first of three waits for the others' prompts: that is no interval between tokens of decoding."""
    llm = TimedEngine()
    streams = Streams(3, 100, 6)
    run = run_streams(llm, streams, streams.requests(1000), llm.clock)  # type: ignore[arg-type]
    assert run.times_to_first_token == pytest.approx([0.1, 0.2, 0.3])
    assert [interval.seconds for interval in run.intervals] == pytest.approx(
        [0.01] * 13
    )  # the last prompt's interval is whole


def test_what_the_engine_adds_to_a_step() -> None:
    llm = TimedEngine()
    result = LatencyResult(Streams(1, 100, 11), bound=0.002)
    latency.measure(llm, result, num_repeats=2, clock=llm.clock)  # type: ignore[arg-type]
    assert len(result.runs) == 2
    assert result.overhead is None
    result.step_time = 0.008
    assert result.overhead == pytest.approx(0.25)
    data = result.as_json()
    assert data["time_per_token_s"] == pytest.approx(0.01)
    assert data["itl_s"]["p99"] == pytest.approx(0.01)
    assert data["time_to_first_token_s"] == pytest.approx(0.1)


def test_the_bare_step_is_that_of_the_mean_context() -> None:
    """Token 1 comes from the prompt; tokens 2 to 11 are made over 101 to 110 tokens."""
    assert Streams(1, 100, 11).mean_context_len == pytest.approx(sum(range(101, 111)) / 10, abs=0.5)


@pytest.mark.parametrize("bad", ["concurrency", "input_len", "output_len"])
def test_streams_refuse_nonsense(bad: str) -> None:
    with pytest.raises(ValueError, match=bad):
        Streams(**{bad: 0})


# ---- long prompts ----

LONG = LongPrompts(
    num_requests=2, input_len=(10, 10), output_len=(1000, 1000), long_len=500, long_output_len=3,
    interval=1.0, seconds=3.0,
)  # fmt: skip


def window_of(llm: TimedEngine, workload: LongPrompts, is_arriving: bool) -> Window:
    running, long = (case.requests for case in workload.cases(1000))
    return run_window(llm, workload, running, long if is_arriving else [], llm.clock)  # type: ignore[arg-type]


def test_without_arrivals_intervals_are_steps() -> None:
    window = window_of(TimedEngine(), LONG, False)
    assert window.seconds == pytest.approx(3.0, abs=0.011)
    assert [interval.seconds for interval in window.intervals] == pytest.approx(
        [0.01] * len(window.intervals)
    )
    assert len(window.intervals) == pytest.approx(600, abs=2)
    assert (window.num_arrivals, window.times_to_first_token) == (0, [])


def test_a_long_prompt_stops_everybody_for_its_prefill() -> None:
    window = window_of(TimedEngine(), LONG, True)
    assert window.num_arrivals == 3
    long = [interval.seconds for interval in window.intervals if interval.seconds > 0.02]
    assert long == pytest.approx([0.51] * 6)  # two requests, three times: prefill, then a step
    assert window.times_to_first_token == pytest.approx([0.5] * 3, abs=0.011)
    assert window.itl.p50 == pytest.approx(0.01)
    assert window.itl.max == pytest.approx(0.51)


def test_arrivals_keep_their_times_when_the_engine_is_late() -> None:
    """Prefills of 1.5 s, one due each second: the third waits for the first two."""
    window = window_of(TimedEngine(seconds_a_prompt_token=0.003), LONG, True)
    assert window.times_to_first_token[0] == pytest.approx(1.5)
    assert window.times_to_first_token[1] == pytest.approx(2.0, abs=0.02)


def test_an_interval_that_outlasts_the_window_is_whole() -> None:
    """Prefills of 5 s in a window of 3 s: no request gets a token before all three are done."""
    window = window_of(TimedEngine(seconds_a_prompt_token=0.01), LONG, True)
    assert [interval.seconds for interval in window.intervals] == pytest.approx([15.01] * 2)
    assert window.num_arrivals == 3


def test_a_window_ends_when_a_running_request_does() -> None:
    workload = LongPrompts(num_requests=2, input_len=(10, 10), output_len=(20, 20), seconds=3.0)
    window = window_of(TimedEngine(), workload, False)
    assert window.seconds == pytest.approx(0.18, abs=1e-6)  # tokens 3 to 20


def test_no_request_is_left_behind_a_window() -> None:
    llm = TimedEngine()
    window_of(llm, LONG, True)
    assert (list(llm.waiting), llm.running) == ([], [])
    late = TimedEngine(interrupt_at=100)
    with pytest.raises(KeyboardInterrupt):
        window_of(late, LONG, True)
    assert (list(late.waiting), late.running) == ([], [])


def test_a_running_request_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="r1 gave 1 tokens instead of 1000"):
        window_of(TimedEngine(longest=1), LONG, True)


def test_the_ratio_is_with_over_without() -> None:
    def window(*seconds: float) -> Window:
        return Window(3.0, [Interval(0, each, 1) for each in seconds], 3, [0.5])

    result = LongPromptsResult([Repeat(window(1, 1), window(3, 3)), Repeat(window(2, 2), window(1, 1))])
    result.repeats.append(Repeat(window(1), window(2)))
    assert [repeat.p99_ratio for repeat in result.repeats] == [3, 0.5, 2]
    assert result.p99_ratio == 2
    assert result.as_json()["runs"][0]["with_arrivals"]["itl_s"]["p99"] == 3


def test_long_prompts_are_measured_with_and_without_in_turn() -> None:
    llm = TimedEngine()
    result = LongPromptsResult()
    names: list[str] = []
    long_prompts.measure(
        llm, LONG, result, num_repeats=2, num_warm_ups=0, on_run=names.append, clock=llm.clock
    )  # type: ignore[arg-type]  # fmt: skip
    assert [("without" in name, "with long" in name) for name in names] == [
        (True, False), (False, True), (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert len(result.repeats) == 2
    assert llm.num_flushes == 5
    assert result.p99_ratio == pytest.approx(0.51 / 0.01, rel=0.05)
