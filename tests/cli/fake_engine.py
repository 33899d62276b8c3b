"""An engine that answers from a script, so that the commands' own behaviour can be tested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from diptych.shared.config import EngineConfig
from diptych.shared.flags.engine_flags import SpeculativeAlgorithm
from diptych.shared.interfaces import SchedulerStats
from diptych.shared.types import (
    FinishAbort,
    FinishLength,
    FinishToken,
    GenerateOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprob,
)


class FakeTokenizer:
    """One id per character; a chat is "role:content|" per message, then "assistant:"."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        text = "".join(f"{message['role']}:{message['content']}|" for message in messages)
        return self.encode(text + "assistant:")


@dataclass(frozen=True)
class FakeModelConfig:
    context_len: int = 1000
    vocab_size: int = 500


@dataclass
class FakeLLM:
    """Streams `answer` letter by letter. `interrupt_after`: Ctrl-C arrives after so many letters."""

    answer: str = "Bergen."
    context_len: int = 1000
    interrupt_after: int | None = None
    speculative: SpeculativeAlgorithm | None = None
    finish: str = "stop"
    prompts: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    num_closed: int = 0
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = EngineConfig(
            model="fake", context_len=self.context_len, max_total_tokens=100_000, speculative=self.speculative
        )
        self.model_config = FakeModelConfig()
        self.tokenizer = FakeTokenizer()

    def text_of(self, index: int) -> str:
        prompt = self.prompts[index]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def stream(self, prompt: Any, sampling_params: SamplingParams) -> Iterator[GenerateOutput]:
        self.prompts.append(prompt)
        self.params.append(sampling_params)
        return self._pieces(len(prompt), sampling_params)

    def _pieces(self, num_prompt_tokens: int, params: SamplingParams) -> Iterator[GenerateOutput]:
        is_whole = False
        try:
            for number, letter in enumerate(self.answer, start=1):
                if self.interrupt_after is not None and number > self.interrupt_after:
                    raise KeyboardInterrupt
                is_last = number == len(self.answer)
                logprobs = (
                    [TokenLogprob(ord(letter), -0.5, ((ord("x"), -1.25),))] if params.return_logprob else []
                )
                yield GenerateOutput(
                    rid="r", index=0, text=letter, output_ids=[ord(letter)],
                    finish_reason=FINISH_BY_KIND[self.finish] if is_last else None,
                    num_prompt_tokens=num_prompt_tokens, num_output_tokens=number,
                    num_cached_tokens=num_prompt_tokens // 2, output_logprobs=logprobs,
                )  # fmt: skip
            is_whole = True
        finally:
            self.num_closed += not is_whole

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=0, num_running=0, num_steps=7, num_prompt_tokens=200, num_cached_tokens=50,
            num_generated_tokens=9, num_retractions=0, new_token_ratio=0.7,
            speculation=SpeculationStats(4, 12, 6) if self.speculative else SpeculationStats(),
        )  # fmt: skip


FINISH_BY_KIND = {
    "stop": FinishToken(token_id=1),
    "length": FinishLength(length=7),
    "abort": FinishAbort("the queue is full", status=503),
}
