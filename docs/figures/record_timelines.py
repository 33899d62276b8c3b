"""Recordings of the engine on a GPU: python -m docs.figures.record_timelines docs/measurements/data

Two runs never take the same time, so the recordings are in the tree and `make figures` only draws them.
Random weights; two shapes, four engines, some minutes on one H200.
"""

from __future__ import annotations

import json
import random
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from diptych.shared import hardware
from diptych.shared.engine.llm import LLM
from diptych.shared.timeline import Recording, Span
from diptych.shared.tools.bench.drive import Sampling, submit, submitted
from diptych.shared.tools.bench.workloads import Request

SAMPLING = Sampling(temperature=0.6, seed=0)


def prompt(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(10_000) for _ in range(length)]


def overlap(scheduler: str, num_requests: int = 256, num_steps: int = 6) -> dict[str, Any]:
    """Some decode steps in the middle of a run. scheduler "reference": CPU and GPU work in turns."""
    flags = {"use": {"scheduler": scheduler}} if scheduler != "optimized" else {}
    llm = LLM("Qwen3-0.6B", load_format="dummy", **flags)
    dice = random.Random(0)
    requests = [Request(prompt(dice, 64), 200) for _ in range(num_requests)]
    for _ in range(2):  # the first run warms up
        with submitted(llm, requests, SAMPLING) as (collectors, _start):
            while min(collector.num_output_tokens for collector in collectors) < 100:
                llm.step()
            llm.timeline.start(llm.assembly.parts.allocator.device)
            for _ in range(3 * num_steps):
                llm.step()
            recording = llm.timeline.stop()
    steps = sorted(recording.forward, key=lambda span: span.start)[num_steps : 2 * num_steps]
    facts = {"model": "Qwen3-0.6B", "num_requests": num_requests, "scheduler": scheduler}
    return {**facts, **cut(recording, steps[0].start - 1e-3, steps[-1].end + 1e-3)}


def long_prompt(flags: dict[str, Any], num_requests: int = 32, long_len: int = 8192) -> dict[str, Any]:
    """Requests that decode, and one long prompt that arrives meanwhile."""
    llm = LLM("Qwen3-8B", load_format="dummy", **flags)
    dice = random.Random(0)
    requests = [Request(prompt(dice, 512), 1000) for _ in range(num_requests)]
    for _ in range(2):
        long = Request(prompt(dice, long_len), 16)
        with submitted(llm, requests, SAMPLING) as (collectors, _start):
            while min(collector.num_output_tokens for collector in collectors) < 60:
                llm.step()
            zero = llm.timeline.clock()
            llm.timeline.start(llm.assembly.parts.allocator.device)
            for _ in range(8):
                llm.step()
            arrival = llm.timeline.clock() - zero
            extra = submit(llm, long, SAMPLING)
            tokens = []  # when the first decoding request gets a token
            known, first = collectors[0].num_output_tokens, None
            while extra.num_output_tokens < 8:
                llm.step()
                now = llm.timeline.clock() - zero
                if collectors[0].num_output_tokens > known:
                    known = collectors[0].num_output_tokens
                    tokens.append(now)
                if first is None and extra.num_output_tokens:
                    first = now
            recording = llm.timeline.stop()
            llm.abort(extra.rid)
    assert first is not None
    start, end = arrival - 0.04, first + 0.05
    moments = {"arrival": arrival, "first_token": first}
    return {
        "model": "Qwen3-8B",
        "num_requests": num_requests,
        "long_len": long_len,
        "flags": flags,
        "token_times": [ms(time - start) for time in tokens if time < end],
        **{name: ms(time - start) for name, time in moments.items()},
        **cut(recording, start, end),
    }


def cut(recording: Recording, start: float, end: float) -> dict[str, Any]:
    """The spans that lie in a window, in milliseconds from its start."""

    def spans(of: list[Span]) -> list[list[Any]]:
        inside = sorted((s for s in of if s.end > start and s.start < end), key=lambda span: span.start)
        return [
            [
                s.name,
                ms(s.start - start),
                ms(s.end - start),
                *(s.args[k] for k in ("requests", "new_tokens") if k in s.args),
            ]
            for s in inside
        ]

    return {"cpu": spans(recording.host), "gpu": spans(recording.forward), "length": ms(end - start)}


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


RUNS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "overlap": [(overlap, {"scheduler": "reference"}), (overlap, {"scheduler": "optimized"})],
    "long-prompt": [
        (long_prompt, {"flags": {}}),
        (long_prompt, {"flags": {"enable_mixed_chunk": True, "chunked_prefill_size": 512}}),
    ],
}


def main(folder: str) -> None:
    for name, runs in RUNS.items():
        recorded = []
        for record, arguments in runs:
            with get_context("spawn").Pool(1) as fresh:  # a process each: an engine takes the GPU's memory
                recorded.append(fresh.apply(record, kwds=arguments))
        data = {"gpus": hardware.facts()["gpus"], "torch": torch.__version__, "runs": recorded}
        Path(folder, f"{name}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
