"""An engine whose steps take as long as a test says, by a clock that only they move."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from diptych.shared.interfaces import SchedulerStats
from diptych.shared.timeline import Timeline
from diptych.shared.types import FinishAbort, FinishLength, FinishReason, SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Collector:
    rid: str
    num_prompt_tokens: int
    params: SamplingParams
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class TimedEngine:
    """Prefill comes first, one prompt a step; then each request gets `tokens_a_step`. `interrupt_at`: Ctrl-C
    arrives in that step."""

    clock: Clock = field(default_factory=Clock)
    seconds_a_prompt_token: float = 0.001
    seconds_a_decode: float = 0.01
    tokens_a_step: int = 1
    interrupt_at: int | None = None
    longest: int = 100_000  # answers end here, whatever was asked for
    prompts: list[list[int]] = field(default_factory=list)
    num_flushes: int = 0

    def __post_init__(self) -> None:
        allocator = SimpleNamespace(size=100_000, device=torch.device("cpu"))
        self.assembly = SimpleNamespace(parts=SimpleNamespace(allocator=allocator), lora=None)
        self.adapters: list[str | None] = []  # of each request
        self.config = SimpleNamespace(context_len=10_000)
        self.model_config = SimpleNamespace(vocab_size=1000)
        self.timeline = Timeline(self.clock)
        self.waiting: deque[Collector] = deque()
        self.running: list[Collector] = []
        self.num_steps = 0
        self.num_generated = 0

    def submit(
        self, prompt: list[int], params: SamplingParams, *, lora: str | None = None
    ) -> list[Collector]:
        self.prompts.append(prompt)
        self.adapters.append(lora)
        self.waiting.append(Collector(f"r{len(self.prompts)}", len(prompt), params))
        return [self.waiting[-1]]

    def step(self) -> bool:
        if not self.waiting and not self.running:
            return False
        self.num_steps += 1
        if self.num_steps == self.interrupt_at:
            raise KeyboardInterrupt
        if self.waiting:
            self.running.append(self.waiting.popleft())
            self.clock.now += self.seconds_a_prompt_token * self.running[-1].num_prompt_tokens
            self._give(self.running[-1], 1)
        else:
            self.clock.now += self.seconds_a_decode
            for collector in list(self.running):
                self._give(collector, self.tokens_a_step)
        return True

    def _give(self, collector: Collector, num_tokens: int) -> None:
        longest = min(self.longest, collector.params.max_new_tokens)
        num_tokens = min(num_tokens, longest - collector.num_output_tokens)
        collector.num_output_tokens += num_tokens
        self.num_generated += num_tokens
        if collector.num_output_tokens == longest:
            collector.finish_reason = FinishLength(longest)
            self.running.remove(collector)

    def abort(self, rid: str) -> bool:
        for collector in [*self.waiting, *self.running]:
            if collector.rid == rid:
                collector.finish_reason = FinishAbort("aborted")
                (self.waiting if collector in self.waiting else self.running).remove(collector)
                return True
        return False

    def flush_cache(self) -> bool:
        self.num_flushes += 1
        return not self.waiting and not self.running

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=len(self.waiting), num_running=len(self.running), num_steps=self.num_steps,
            num_prompt_tokens=0, num_cached_tokens=0, num_generated_tokens=self.num_generated,
            num_retractions=0, new_token_ratio=0.7,
        )  # fmt: skip
