"""Measures the gain of speculation end to end: the same greedy requests with and without it, compared token
by token.

Unlike the cost of a round (shared/tools/bench/round_cost.py), the gain depends on the model, the draft model
and the text. Answers end where the model ends them, because text behind an end of sequence is not
representative.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from diptych.shared.engine.python_runtime import gc_freeze
from diptych.shared.tools.bench.drive import Clock, OnTokens, flush
from diptych.shared.types import FinishAbort, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM
    from diptych.shared.engine.requests.output_collector import OutputCollector

NUM_ALTERNATIVES = 20
"""The number of likeliest tokens among which the two differing ones are searched for."""
NO_TOKEN = -1
"""The token where one of the answers has ended."""


class Pass(NamedTuple):
    """One pass over all requests, in seconds from the first submission to the last token."""

    total_time: float
    num_steps: int
    output_ids: list[list[int]]
    speculation: SpeculationStats  # summed over the requests

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.output_ids))

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prompts included."""
        return self.num_tokens / self.total_time

    def as_json(self) -> dict[str, Any]:
        return {
            "total_s": self.total_time,
            "num_steps": self.num_steps,
            "num_output_tokens": self.num_tokens,
            "tokens_per_s": self.tokens_per_second,
            "speculation": self.speculation._asdict(),
        }


@dataclass(frozen=True)
class Departure:
    """The position at which an answer differs from the one without speculation."""

    request: int
    position: int  # of the first token that differs
    distance: (
        float | None
    )  # difference in log-probability of the two tokens there; None: one is not among the likeliest


@dataclass
class Comparison:
    """The results of one batch size. They grow during the measurement, so an interrupt keeps the complete
    passes."""

    batch_size: int
    speculative: list[Pass] = field(default_factory=list)
    plain: list[Pass] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return bool(self.speculative and self.plain)

    def as_json(self) -> dict[str, Any]:
        stats = self.speculative[0].speculation
        plain, speculative = (
            statistics.median(r.tokens_per_second for r in runs) for runs in (self.plain, self.speculative)
        )
        return {
            "batch_size": self.batch_size,
            "plain_tokens_per_s": plain,
            "speculative_tokens_per_s": speculative,
            "speedup": speculative / plain,
            "tokens_per_verification": stats.acceptance_length_with_bonus,
            "accepted_per_verification": stats.acceptance_length,
            "acceptance_rate": stats.acceptance_rate,
            "num_verifications": stats.num_verifications,
            "num_requests": len(self.plain[0].output_ids),
            "departures": [asdict(departure) for departure in self.departures],
            "plain": [run.as_json() for run in self.plain],
            "speculative": [run.as_json() for run in self.speculative],
        }


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    batch_size: int,
    runs: list[Pass],
    *,
    max_new_tokens: int,
    num_repeats: int = 3,
    num_warm_ups: int = 1,
    on_run: Callable[[str, int | None], OnTokens | None] = lambda what, num_tokens: None,
    clock: Clock = time.perf_counter,
) -> None:
    """Measure the passes."""
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    num_tokens: int | None = None
    for i in range(-num_warm_ups, num_repeats):
        what = "warm-up" if i < 0 else f"{i + 1} of {num_repeats}"
        name = "plain" if llm.config.speculative is None else llm.config.speculative
        on_tokens = on_run(f"{name}, concurrency {batch_size}: {what}", num_tokens)
        run = answer_all(llm, prompts, batch_size, params, clock, on_tokens)
        num_tokens = run.num_tokens
        if i >= 0:
            runs.append(run)


def answer_all(
    llm: LLM,
    prompts: Sequence[list[int]],
    batch_size: int,
    params: SamplingParams,
    clock: Clock = time.perf_counter,
    on_tokens: OnTokens | None = None,
) -> Pass:
    """Answer all requests from an empty cache, with up to `batch_size` concurrent requests."""
    flush(llm)
    collectors: list[OutputCollector] = []
    alive: list[OutputCollector] = []
    waiting = deque(prompts)
    num_steps = llm.stats().num_steps
    start = clock()
    try:
        with gc_freeze():
            while waiting or alive:
                while waiting and len(alive) < batch_size:
                    alive += llm.submit(waiting.popleft(), params)
                    collectors.append(alive[-1])
                llm.step()
                alive = [collector for collector in alive if not collector.is_finished]
                if on_tokens is not None:
                    on_tokens(sum(collector.num_output_tokens for collector in collectors))
        total_time = clock() - start
    finally:
        for collector in alive:
            llm.abort(collector.rid)
        while llm.step():
            pass
    for collector in collectors:
        if isinstance(collector.finish_reason, FinishAbort):
            raise ValueError(f"{collector.rid} failed: {collector.finish_reason.message}")
    return Pass(
        total_time=total_time,
        num_steps=llm.stats().num_steps - num_steps,
        output_ids=[collector.output_ids for collector in collectors],
        speculation=SpeculationStats(*map(sum, zip(*(collector.speculation for collector in collectors)))),
    )


def departures(llm: LLM, prompts: Sequence[list[int]], plain: Pass, speculative: Pass) -> list[Departure]:
    """The answers that differ. In a half type, near ties may be decided either way, because steps of another
    shape add in another order. So the engine computes the gap between the two tokens."""
    found = []
    for request, (expected, got) in enumerate(zip(plain.output_ids, speculative.output_ids)):
        if expected != got:
            pairs = enumerate(zip(expected, got))
            position = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))
            tokens = [(*ids, NO_TOKEN)[position] for ids in (expected, got)]
            distance = _distance(llm, prompts[request] + expected[:position], *tokens)
            found.append(Departure(request, position, distance))
    return found


def _distance(llm: LLM, prompt: list[int], *pair: int) -> float | None:
    params = SamplingParams(
        temperature=0.0, max_new_tokens=1, return_logprob=True, top_logprobs_num=NUM_ALTERNATIVES
    )
    (answer,) = llm.generate([prompt], params, progress=False)  # type: ignore[misc]
    likely: dict[int, float] = dict(answer.output_logprobs[0].top)
    if not set(pair) <= set(likely):
        return None
    return abs(likely[pair[0]] - likely[pair[1]])
