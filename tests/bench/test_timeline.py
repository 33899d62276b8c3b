"""The timeline and its file, with a clock that the test moves and a device that runs behind the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.perfetto import chrome_trace
from diptych.shared.timeline import Recording, Span, Timeline
from diptych.shared.tools.bench.trace import idle_time, write_trace
from diptych.shared.tools.conformance.oracles.scheduler_harness import SchedulerHarness
from diptych.shared.types import ForwardBatch, ForwardMode, SamplingParams

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LateDevice:
    """Its marks can only be read once everything is done: each is 5 seconds after the CPU recorded it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_done = False

    def mark(self) -> float:
        return self.clock.now

    def times(self, marks: Sequence[Any]) -> list[float]:
        self.is_done = True
        return [mark + 5 for mark in marks]


def batch(mode: ForwardMode, *lens: int, cached: int = 0) -> ForwardBatch:
    num = torch.tensor
    new = [1 if mode is ForwardMode.DECODE else n - cached for n in lens]
    tokens = torch.zeros(sum(new), dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode, input_ids=tokens, positions=tokens, req_pool_indices=num(list(range(len(lens)))),
        seq_lens=num(lens), out_cache_loc=tokens, extend_seq_lens=num(new), extend_start_loc=num(new),
        seq_lens_cpu=tuple(lens), extend_seq_lens_cpu=tuple(new),
    )  # fmt: skip


def record() -> Recording:
    clock = Clock()
    timeline, device = Timeline(clock), LateDevice(clock)
    timeline.start(CPU, device)
    clock.now += 1
    with timeline.span("schedule", policy="fcfs"):
        clock.now += 2
        with timeline.span("match"):
            clock.now += 3
        clock.now += 1
    with timeline.forward(batch(ForwardMode.EXTEND, 7, 9, cached=2)):
        clock.now += 4
    timeline.count(running=2, free_tokens=30)
    clock.now += 6
    with timeline.forward(batch(ForwardMode.DECODE, 8, 10)):
        clock.now += 10
    assert not device.is_done
    recording = timeline.stop()
    assert device.is_done
    assert not timeline.is_on
    return recording


def test_spans_of_host_and_device() -> None:
    recording = record()
    prefill = {"requests": 2, "new_tokens": 12, "kv_tokens": 16}
    decode = {"requests": 2, "new_tokens": 2, "kv_tokens": 18}
    assert recording.host == [
        Span("match", 3, 6, {}),
        Span("schedule", 1, 7, {"policy": "fcfs"}),
        Span("launch", 7, 11, prefill),
        Span("launch", 17, 27, decode),
    ]
    assert recording.forward == [Span("extend", 12, 16, prefill), Span("decode", 22, 32, decode)]
    assert recording.counts == [(11, {"running": 2, "free_tokens": 30})]


def test_idle_share_is_what_lies_between_steps() -> None:
    idle = idle_time(record().forward)
    assert (idle.num_steps, idle.busy, idle.idle, idle.longest_idle) == (2, 14, 6, 6)
    assert idle.share == pytest.approx(0.3)
    assert idle_time([]).share == 0


def test_steps_that_overlap_are_no_gap() -> None:
    spans = [Span("a", 0, 10, {}), Span("b", 12, 14, {}), Span("c", 4, 8, {}), Span("d", 13, 20, {})]
    idle = idle_time(spans)
    assert (idle.busy, idle.idle, idle.longest_idle) == (18, 2, 2)


def test_nothing_is_recorded_while_it_is_off() -> None:
    timeline = Timeline(Clock())
    with timeline.span("schedule"), timeline.forward(batch(ForwardMode.DECODE, 3)):
        timeline.count(running=1)
    timeline.start(CPU)
    recording = timeline.stop()
    assert (recording.host, recording.forward, recording.counts) == ([], [], [])
    assert timeline.span("a") is timeline.span("b"), "while off, a span is one shared object"


def test_a_second_recording_begins_anew() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    for _ in range(2):
        timeline.start(CPU)
        with timeline.span("step"):
            clock.now += 1
        assert timeline.stop().host == [Span("step", 0, 1, {})]


def test_a_failing_step_is_recorded_too() -> None:
    timeline = Timeline(Clock())
    timeline.start(CPU)
    with pytest.raises(RuntimeError), timeline.forward(batch(ForwardMode.DECODE, 3)):
        raise RuntimeError
    recording = timeline.stop()
    assert [span.name for span in recording.host + recording.forward] == ["launch", "decode"]


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="mps"):
        Timeline().start(torch.device("mps"))


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The file's own rules; returns its complete events."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in ("M", "X", "C")
        assert isinstance(event["name"], str)
        assert {type(event["pid"]), type(event["tid"])} == {int}
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    spans = [event for event in events if event["ph"] == "X"]
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(span["pid"], span["tid"]) for span in spans} <= threads
    for thread in threads:
        check_nesting([span for span in spans if (span["pid"], span["tid"]) == thread])
    return spans


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Sorted by start: each lies inside the one that is open, or behind it."""
    open_ends: list[float] = []
    for span in spans:
        end = span["ts"] + span["dur"]
        while open_ends and open_ends[-1] <= span["ts"] + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3, span
        open_ends.append(end)


def test_the_file_keeps_the_rules_of_its_format(tmp_path: Path) -> None:
    idle = write_trace(tmp_path / "trace.json", record())
    assert idle.share == pytest.approx(0.3)
    spans = check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("schedule", 1e6, 6e6),
        ("match", 3e6, 3e6),
        ("launch", 7e6, 4e6),
        ("extend", 12e6, 4e6),
        ("launch", 17e6, 10e6),
        ("decode", 22e6, 10e6),
    ]


def test_of_spans_that_start_at_once_the_outer_comes_first() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.start(CPU)
    with timeline.span("outer"):
        with timeline.span("inner"):
            clock.now += 1
        clock.now += 1
    spans = check_trace(chrome_trace(timeline.stop()))
    assert [span["name"] for span in spans] == ["outer", "inner"]


@pytest.mark.parametrize(
    "spans", [[(0, 10), (5, 10)], [(0, 10), (2, 3), (2.5, 4)]], ids=["across the end", "across a sibling"]
)
def test_the_check_of_nesting_can_fail(spans: list[tuple[float, float]]) -> None:
    with pytest.raises(AssertionError):
        check_nesting([{"ts": start, "dur": length} for start, length in spans])


def test_a_scheduler_without_a_timeline_records_nothing() -> None:
    harness = SchedulerHarness()
    harness.submit([1, 2, 3], 4)
    harness.run()
    harness.expect_idle()
    assert not harness.scheduler.parts.timeline.is_on


def test_an_engine_tells_what_it_does() -> None:
    llm = LLM(model="tiny-dense", device="cpu", panel="reference", max_total_tokens=256)
    llm.timeline.start(CPU)
    llm.generate(["Hello", "Who?"], SamplingParams(max_new_tokens=3, ignore_eos=True), progress=False)
    recording = llm.timeline.stop()
    assert [span.name for span in recording.forward] == ["extend", "decode", "decode"]
    names = [span.name for span in recording.host]
    step = ["schedule", "prepare", "launch", "wait for tokens", "process results", "detokenise"]
    assert names == ["tokenise", "receive"] * 2 + step * 3
    assert [count.values["running"] for count in recording.counts] == [2, 2, 0]
    assert recording.counts[0].values["waiting"] == 0
    free = [count.values["free_tokens"] for count in recording.counts]
    assert free[0] - free[1] == 2
    check_trace(chrome_trace(recording))


@pytest.mark.gpu
def test_a_gpu_tells_when_it_worked() -> None:
    """A product of 8192 x 8192 matrices takes over a millisecond on any GPU, its launch far less."""
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device)
    a @ a
    timeline = Timeline()
    timeline.start(device)
    for _ in range(5):
        with timeline.forward(batch(ForwardMode.DECODE, 3)):
            a @ a
    recording = timeline.stop()
    assert recording.host[-1].end < recording.forward[-1].end, "the CPU ran ahead"
    assert all(span.end - span.start > 1e-3 for span in recording.forward)
    assert idle_time(recording.forward).share < 0.02


@pytest.mark.gpu
def test_an_engine_on_a_gpu_waits_for_no_event_before_the_end() -> None:
    """A step's work on the device begins after its launch and ends before its tokens are on the CPU."""
    llm = LLM(model="tiny-dense", device="cuda", max_total_tokens=4096)
    for _ in range(2):  # the first time, kernels are compiled
        llm.timeline.start(llm.assembly.parts.allocator.device)
        llm.generate(["Hello", "Who?"], SamplingParams(max_new_tokens=20, ignore_eos=True), progress=False)
        recording = llm.timeline.stop()
    launches = [span for span in recording.host if span.name == "launch"]
    assert len(launches) == len(recording.forward) >= 20
    slack = 1e-4  # of two clocks
    for launch, forward in zip(launches, recording.forward):
        assert launch.start - slack < forward.start <= forward.end
    assert recording.forward[-1].end < recording.host[-1].end + slack
    assert 0 <= idle_time(recording.forward).share < 1
    check_trace(chrome_trace(recording))
