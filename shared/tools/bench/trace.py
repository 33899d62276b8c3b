"""Writes a recorded timeline for Perfetto, and computes the device's idle share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diptych.shared.engine.perfetto import chrome_trace
from diptych.shared.timeline import Recording, Span

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM


class Idle(NamedTuple):
    """The device's time between steps, from the start of the first step to the end of the last. A step starts
    when the device's stream reaches it; waits inside a step are not included."""

    num_steps: int
    busy: float  # seconds
    idle: float
    longest_idle: float

    @property
    def share(self) -> float:
        whole = self.busy + self.idle
        return self.idle / whole if whole else 0.0


@dataclass(kw_only=True)
class Traced:
    """A result with a recorded timeline of the engine."""

    idle: Idle | None = None
    recording: Recording | None = None

    @contextmanager
    def record(self, llm: LLM) -> Iterator[None]:
        """Record the timeline within the block. An interrupt keeps what was recorded."""
        llm.timeline.start(llm.assembly.parts.allocator.device)
        try:
            yield
        finally:
            self.recording = llm.timeline.stop()
            self.idle = idle_time(self.recording.forward)

    def repeat(
        self, llm: LLM, run: Callable[[str], Any], runs: list[Any], num_repeats: int, num_warm_ups: int
    ) -> None:
        """Make warm-up runs, measured runs, and one run with the timeline on."""
        for _ in range(num_warm_ups):
            run("warm-up")
        runs += (run(f"{number + 1} of {num_repeats}") for number in range(num_repeats))
        with self.record(llm):
            run("timeline")

    def idle_as_json(self) -> dict[str, float] | None:
        if self.idle is None:
            return None
        return {
            "share": self.idle.share,
            "num_steps": self.idle.num_steps,
            "busy_s": self.idle.busy,
            "idle_s": self.idle.idle,
            "longest_idle_s": self.idle.longest_idle,
        }


def idle_time(forward: Sequence[Span]) -> Idle:
    spans = sorted(forward, key=lambda span: span.start)
    pauses, covered_until = [0.0], spans[0].start if spans else 0.0
    for span in spans:
        pauses.append(max(0.0, span.start - covered_until))
        covered_until = max(covered_until, span.end)
    whole = covered_until - spans[0].start if spans else 0.0
    return Idle(len(spans), whole - sum(pauses), sum(pauses), max(pauses))


def write_trace(file: Path, recording: Recording) -> Idle:
    file.write_text(json.dumps(chrome_trace(recording)) + "\n", encoding="utf-8")
    return idle_time(recording.forward)
