"""Timeline: spans of CPU work, forward passes of the device, and counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from diptych.shared.types import ForwardBatch

Clock = Callable[[], float]
NUM_TIES = 20


class Span(NamedTuple):
    """Times in seconds since the recording began."""

    name: str
    start: float
    end: float
    args: dict[str, Any]


class Count(NamedTuple):
    time: float
    values: dict[str, float]


@dataclass
class Recording:
    """Host spans are in the order of their ends, so one that lies inside another comes first."""

    device: str
    host: list[Span] = field(default_factory=list)
    forward: list[Span] = field(default_factory=list)  # one for each step, on the device
    counts: list[Count] = field(default_factory=list)


class DeviceClock(Protocol):
    """Times of work on the device, in the CPU's clock."""

    def mark(self) -> Any:
        """Stands for the moment at which the device gets here. Waits for nothing."""

    def times(self, marks: Sequence[Any]) -> list[float]:
        """The moments of these marks, which were made one after the other. May wait for the device."""


class HostClock:
    """The clock of a CPU, which does its work at once."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock

    def times(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class CudaClock:
    """Events on whichever stream is current. One that is waited for ties the two clocks together: of several
    the one that came back soonest, since a GPU that others use too may keep an event back."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        ties = []
        for _ in range(NUM_TIES):
            start, event = clock(), self.mark()
            event.synchronize()
            ties.append((clock() - start, clock(), event))
        _, self.first_time, self.first = min(ties, key=lambda tie: tie[0])

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def times(self, marks: Sequence[Any]) -> list[float]:
        torch.cuda.synchronize(self.device)
        now, found = self.first_time, []
        # From mark to mark: a float32 of milliseconds since the first would be too coarse after a minute.
        for before, event in pairwise([self.first, *marks]):
            now += before.elapsed_time(event) / 1e3
            found.append(now)
        return found


class Timeline:
    """Off until `start`: then `span` and `forward` hand out a context that does nothing."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.is_on = False
        self.marks_ranges = False  # spans are NVTX ranges too, for tools of CUDA

    def start(self, device: torch.device, device_clock: DeviceClock | None = None) -> None:
        """Begin a new recording. `device_clock`: by default what suits the device."""
        if device_clock is None:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"a timeline needs events of a CUDA GPU, or a CPU; the device is {device}")
            device_clock = CudaClock(device, self.clock) if device.type == "cuda" else HostClock(self.clock)
        self._device_clock = device_clock
        self._recording = Recording(str(device))
        self._passes: list[tuple[str, dict[str, Any], Any, Any]] = []  # name, args, first and last mark
        self._zero = self.clock()
        self.is_on = True

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """A span of CPU work."""
        return _OpenSpan(self, name, args) if self.is_on else _NOTHING

    def forward(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Around the launch of a step, with its stream current: a CPU span "launch", and a device span from
        where the stream reaches the step until the step is done."""
        return _OpenForward(self, batch) if self.is_on else _NOTHING

    def count(self, **values: float) -> None:
        """How much there is of something from now on."""
        if self.is_on:
            self._recording.counts.append(Count(self.clock() - self._zero, values))

    def stop(self) -> Recording:
        """Ends the recording, waits for the device, and asks it when it did what."""
        self.is_on = False
        marks = [mark for _, _, *both in self._passes for mark in both]
        times = [moment - self._zero for moment in self._device_clock.times(marks)]
        for (name, args, *_), start, end in zip(self._passes, times[::2], times[1::2]):
            self._recording.forward.append(Span(name, start, end, args))
        return self._recording


_NOTHING: AbstractContextManager[None] = nullcontext()


class _OpenSpan(AbstractContextManager[None]):
    def __init__(self, timeline: Timeline, name: str, args: dict[str, Any]) -> None:
        self.timeline, self.name, self.args = timeline, name, args

    def __enter__(self) -> None:
        self.is_marked = self.timeline.marks_ranges
        if self.is_marked:
            torch.cuda.nvtx.range_push(self.name)
        self.start = self.timeline.clock()

    def __exit__(self, *error: object) -> None:
        if self.is_marked:
            torch.cuda.nvtx.range_pop()
        zero, end = self.timeline._zero, self.timeline.clock()
        self.timeline._recording.host.append(Span(self.name, self.start - zero, end - zero, self.args))


class _OpenForward(_OpenSpan):
    def __init__(self, timeline: Timeline, batch: ForwardBatch) -> None:
        num_new = sum(batch.extend_seq_lens_cpu)
        args = {"requests": batch.batch_size, "new_tokens": num_new, "kv_tokens": sum(batch.seq_lens_cpu)}
        super().__init__(timeline, "launch", args)
        self.mode = batch.forward_mode.name.lower()

    def __enter__(self) -> None:
        super().__enter__()
        self.first = self.timeline._device_clock.mark()

    def __exit__(self, *error: object) -> None:
        last = self.timeline._device_clock.mark()
        self.timeline._passes.append((self.mode, self.args, self.first, last))
        super().__exit__(*error)
