"""Runs requests through the whole engine, from an empty cache to the last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from diptych.shared.engine.python_runtime import gc_freeze
from diptych.shared.tools.bench.workloads import Request
from diptych.shared.types import SamplingParams

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM
    from diptych.shared.engine.requests.output_collector import OutputCollector

Clock = Callable[[], float]
OnTokens = Callable[[int], None]
"""Called after a step, with the number of output tokens so far."""


class Sampling(NamedTuple):
    temperature: float
    seed: int


class Run(NamedTuple):
    """One run of a case, in seconds from the submission of all requests to the last token."""

    total_time: float
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_steps: int
    num_retractions: int
    time_to_first_token: float | None  # of a single request

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return self.num_output_tokens / self.total_time

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that came from the prefix cache."""
        return self.num_cached_tokens / self.num_prompt_tokens

    def as_json(self) -> dict[str, float | None]:
        with_units = {"total_time": "total_s", "time_to_first_token": "time_to_first_token_s"}
        values = {with_units.get(name, name): value for name, value in self._asdict().items()}
        return values | {"tokens_per_s": self.tokens_per_second, "hit_rate": self.hit_rate}


def run_to_end(
    llm: LLM,
    requests: Sequence[Request],
    sampling: Sampling,
    clock: Clock = time.perf_counter,
    on_tokens: OnTokens | None = None,
) -> Run:
    """Run all requests concurrently. The prefix cache is flushed first, and answers have their full
    length."""
    check_fits(llm, requests)
    with submitted(llm, requests, sampling, clock) as (collectors, start):
        before = llm.stats()
        first = None
        while llm.step():
            if first is None and len(collectors) == 1 and collectors[0].num_output_tokens:
                first = clock() - start
            if on_tokens is not None:
                on_tokens(llm.stats().num_generated_tokens - before.num_generated_tokens)
        total_time = clock() - start
    check_whole(collectors, requests)
    after = llm.stats()
    return Run(
        total_time=total_time,
        num_output_tokens=sum(collector.num_output_tokens for collector in collectors),
        num_prompt_tokens=sum(collector.num_prompt_tokens for collector in collectors),
        num_cached_tokens=sum(collector.num_cached_tokens for collector in collectors),
        num_steps=after.num_steps - before.num_steps,
        num_retractions=after.num_retractions - before.num_retractions,
        time_to_first_token=first,
    )


@contextmanager
def submitted(
    llm: LLM, requests: Sequence[Request], sampling: Sampling, clock: Clock = time.perf_counter
) -> Iterator[tuple[list[OutputCollector], float]]:
    """(collectors, time of the first submission), on an engine with an empty cache. The requests take the
    engine's LoRA adapters in turn. Those that have not finished at the end of the block, or when it is
    interrupted, are aborted."""
    flush(llm)
    collectors: list[OutputCollector] = []
    adapters = list(llm.assembly.lora.by_name) if llm.assembly.lora is not None else []
    start = clock()
    try:
        with gc_freeze():  # as `LLM.generate` does
            for request, adapter in zip(requests, cycle(adapters or [None])):
                collectors.append(submit(llm, request, sampling, adapter))
            yield collectors, start
    finally:
        for collector in collectors:
            if not collector.is_finished:
                llm.abort(collector.rid)
        while llm.step():
            pass


def submit(llm: LLM, request: Request, sampling: Sampling, adapter: str | None = None) -> OutputCollector:
    params = SamplingParams(
        max_new_tokens=request.output_len,
        ignore_eos=True,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )
    return llm.submit(request.prompt, params, lora=adapter)[0]


def flush(llm: LLM) -> None:
    if not llm.flush_cache():
        raise ValueError("the engine is busy: a benchmark needs it for itself")


def check_fits(llm: LLM, requests: Sequence[Request]) -> None:
    """Raises `ValueError` for a request that does not fit: the engine would cut its answer."""
    context_len = llm.config.context_len or llm.model_config.context_len
    pool_size = llm.assembly.parts.allocator.size
    for number, request in enumerate(requests, start=1):
        needed = len(request.prompt) + request.output_len
        if needed > context_len or needed - 1 > pool_size:
            raise ValueError(
                f"request {number}, of {len(request.prompt)} + {request.output_len} tokens, must fit into "
                f"the context ({context_len}) and the KV pool ({pool_size})"
            )


def check_whole(collectors: Sequence[OutputCollector], requests: Sequence[Request]) -> None:
    for collector, request in zip(collectors, requests):
        if collector.num_output_tokens != request.output_len:
            raise ValueError(
                f"{collector.rid} gave {collector.num_output_tokens} tokens instead of {request.output_len}: "
                f"{collector.finish_reason}"
            )
