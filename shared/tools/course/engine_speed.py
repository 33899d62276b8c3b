"""Tokens per second of a learner's engine and of both panels, in turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from diptych.shared import registry
from diptych.shared.engine.build.settings import default_device
from diptych.shared.engine.llm import LLM
from diptych.shared.tools.course.lab_scenes import FILLER, QUESTIONS, prompt
from diptych.shared.types import SamplingParams

NUM_TOKENS = 32
NUM_ROUNDS = 3
REQUESTS = [FILLER * 3 + question for question in QUESTIONS] * 2
"""Eight concurrent requests; they share a beginning of 60 tokens, so the prefix cache counts too."""


def tokens_per_s(
    use: dict[str, str], on_progress: Callable[[str], None] = lambda what: None
) -> dict[str, float]:
    """Output tokens per second of "yours", "reference" and "optimized", the best of three rounds. Without a
    GPU, "optimized" is `registry.optimized_without_gpu`. An engine that fails has 0."""
    engines: dict[str, LLM | None] = {}
    for name, flags in flags_of_engines(use).items():
        on_progress(f"starting {name}")
        try:
            engines[name] = LLM("tiny-dense", max_total_tokens=4096, **flags)
        except Exception:
            if name != "yours":
                raise
            engines[name] = None
    best = dict.fromkeys(engines, 0.0)
    for number in range(NUM_ROUNDS + 1):  # the first one warms up
        for name, llm in engines.items():
            on_progress(f"round {number} of {NUM_ROUNDS}: {name}")
            if llm is not None:
                seconds = seconds_of_round(llm)
                if number:
                    best[name] = max(best[name], NUM_TOKENS * len(REQUESTS) / seconds)
    return {name: round(speed, 1) for name, speed in best.items()}


def flags_of_engines(use: dict[str, str]) -> dict[str, dict[str, Any]]:
    if registry.runs_triton(default_device()) and default_device() != "cpu":
        optimized: dict[str, Any] = {"panel": "optimized"}
    else:
        optimized = {"panel": "reference", "use": registry.optimized_without_gpu()}
    return {
        "yours": {"panel": "reference", "use": use},
        "reference": {"panel": "reference"},
        "optimized": optimized,
    }


def seconds_of_round(llm: LLM) -> float:
    """The eight requests on an empty cache. An engine that fails takes for ever."""
    prompts = [prompt(llm, question) for question in REQUESTS]
    params = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    llm.flush_cache()
    start = time.perf_counter()
    try:
        llm.generate(prompts, params, progress=False)
    except Exception:
        return float("inf")
    return time.perf_counter() - start
