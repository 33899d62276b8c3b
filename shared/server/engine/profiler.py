"""/start_profile and /stop_profile: the work of a running engine as a file for Perfetto."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from diptych.shared.engine.perfetto import Life, chrome_trace, kernel_spans
from diptych.shared.timeline import Span, Timeline


class Profiler:
    """Records CPU spans, steps of the device, kernels of a GPU, and lives of requests. It records one profile
    at a time, of the first rank and replica."""

    def __init__(self, timeline: Timeline, device: torch.device) -> None:
        self.timeline = timeline
        self.device = device
        self.file: Path | None = None  # of the profile that is recorded
        self.last_step: int | None = None
        self._kernels: Any = None  # torch's profiler
        self._start_ns = 0
        self._zero = 0.0
        self._lives: dict[str, tuple[float, float | None]] = {}  # arrival, first token
        self._ended: list[Life] = []

    @property
    def is_on(self) -> bool:
        return self.file is not None

    def start(
        self, file: str, num_steps: int, num_done: int, nvtx: bool, rids: Iterable[str]
    ) -> dict[str, Any]:
        """Begin. num_steps: after so many it stops by itself; 0: it does not. rids: requests that live. nvtx:
        mark the spans also for tools of CUDA. Raises `ValueError` if one is recorded, or if the device has no
        clock for it."""
        if self.is_on:
            raise ValueError(f"a profile is being recorded: {self.file}")
        if nvtx and self.device.type != "cuda":
            raise ValueError(f"NVTX ranges need a CUDA GPU; the device is {self.device}")
        self.timeline.start(self.device)
        self.timeline.marks_ranges = nvtx
        self._zero, self._start_ns = self.timeline.clock(), time.time_ns()
        self._lives = dict.fromkeys(rids, (0.0, None))
        self._ended = []
        self.file = Path(file)
        self.last_step = num_done + num_steps if num_steps else None
        if self.device.type == "cuda":
            self._kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._kernels.start()
        return {"file": file}

    def stop(self) -> dict[str, Any]:
        """End, and write the file. Raises `ValueError` if none is recorded."""
        if self.file is None:
            raise ValueError("no profile is being recorded")
        file, self.file = self.file, None
        now = self._now()
        self.timeline.marks_ranges = False
        recording = self.timeline.stop()
        alive = [Life(rid, *times, now) for rid, times in self._lives.items()]
        kernels = self._kernel_spans()
        trace = chrome_trace(recording, [*self._ended, *alive], kernels)
        file.write_text(json.dumps(trace) + "\n", encoding="utf-8")
        return {"file": str(file), "num_steps": len(recording.forward), "num_kernels": len(kernels)}

    def look(self, num_steps: int) -> None:
        """After a step: the engine has made so many."""
        if self.is_on and self.last_step is not None and num_steps >= self.last_step:
            self.stop()

    def came(self, rid: str) -> None:
        if self.is_on:
            self._lives[rid] = self._now(), None

    def has_output(self, rid: str, is_end: bool) -> None:
        """A request has got tokens, or its end."""
        if not self.is_on or rid not in self._lives:
            return
        arrival, first_token = self._lives[rid]
        first_token = self._now() if first_token is None else first_token
        self._lives[rid] = arrival, first_token
        if is_end:
            del self._lives[rid]
            self._ended.append(Life(rid, arrival, first_token, self._now()))

    def _now(self) -> float:
        return self.timeline.clock() - self._zero

    def _kernel_spans(self) -> list[Span]:
        if self._kernels is None:
            return []
        profiler, self._kernels = self._kernels, None
        profiler.stop()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            return kernel_spans(json.loads(Path(file.name).read_text("utf-8")), self._start_ns)
