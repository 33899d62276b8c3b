"""A recorded timeline as a file for Perfetto (ui.perfetto.dev): CPU spans, steps and kernels of the device,
lives of requests, and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diptych.shared.timeline import Recording, Span

HOST, DEVICE, KERNELS = 1, 2, 3
"""The rows of the timeline, as thread ids."""
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of torch.profiler's events that are work of a GPU."""


class Life(NamedTuple):
    """A request: times in seconds since the recording began. None: it has not got there."""

    rid: str
    arrival: float
    first_token: float | None
    end: float


def chrome_trace(
    recording: Recording, lives: Sequence[Life] = (), kernels: Sequence[Span] = ()
) -> dict[str, Any]:
    """The Trace Event Format: complete events ("X"), counters ("C"), and requests as nested spans that may
    overlap ("b", "e"), in microseconds, by their starts."""
    device = "CPU: forward" if recording.device == "cpu" else f"{recording.device}: forward stream"
    events = [_event(HOST, span) for span in recording.host]
    events += [_event(DEVICE, span) for span in recording.forward]
    events += [_event(KERNELS, span) for span in kernels]
    for count in recording.counts:
        for name, value in count.values.items():
            moment = {"ph": "C", "pid": 0, "tid": HOST, "name": name, "ts": _us(count.time)}
            events.append(moment | {"args": {name: value}})
    for life in lives:
        events += _life(life)
    # Of two events with the same start, the longer one encloses the other.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    names = [_name(0, "process_name", "Diptych")]
    names += [_name(HOST, "thread_name", "CPU: scheduler"), _name(DEVICE, "thread_name", device)]
    if kernels:
        names.append(_name(KERNELS, "thread_name", f"{recording.device}: kernels"))
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def kernel_spans(trace: Mapping[str, Any], start_ns: int) -> list[Span]:
    """The work of GPUs in a trace of torch.profiler. start_ns: the wall clock when the recording began."""
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3 - start_ns / 1e3
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in GPU_WORK:
            start = (event["ts"] + base_us) / 1e6
            args = {"stream": event.get("args", {}).get("stream", event.get("tid"))}
            found.append(Span(event["name"], start, start + event["dur"] / 1e6, args))
    return found


def _life(life: Life) -> list[dict[str, Any]]:
    waits_until = life.end if life.first_token is None else life.first_token
    spans = [("request", life.arrival, life.end), ("until the first token", life.arrival, waits_until)]
    if life.first_token is not None:
        spans.append(("decode", life.first_token, life.end))
    moment = {"cat": "request", "pid": 0, "tid": HOST, "id": life.rid}
    return [
        {**moment, "ph": phase, "name": life.rid if name == "request" else name, "ts": _us(time)}
        for name, start, end in spans
        for phase, time in (("b", start), ("e", end))
    ]


def _event(row: int, span: Span) -> dict[str, Any]:
    start, end = _us(span.start), _us(span.end)
    return {
        "ph": "X", "pid": 0, "tid": row, "name": span.name, "cat": "host" if row == HOST else "device",
        "ts": start, "dur": round(end - start, 3), "args": span.args,
    }  # fmt: skip


def _name(row: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": row, "name": what, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
