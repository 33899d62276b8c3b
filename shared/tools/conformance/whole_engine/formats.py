"""Measures the accuracy loss of a number format: exact match on held-out questions, and perplexity of texts.

The engine computes both. A token's log-probability is a prompt log-probability: the model gets the correct
previous tokens (teacher forcing). So two formats are compared token by token, on the same text."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from diptych.shared.config.quant_config import ONLINE
from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import engine_answers, score
from diptych.shared.tools.corpus.exchange import Question
from diptych.shared.types import FinishLength, SamplingParams

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM
    from diptych.shared.text.tokenizer import Tokenizer

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    **{method: {"quantization": method} for method in ONLINE},
    "fp8-kv": {"kv_cache_dtype": "fp8_e4m3"},
}
"""Flags of the engine by the name of a format."""

TEACHER_FORCED = SamplingParams(max_new_tokens=0, return_logprob=True, logprob_start_len=0)

OnProgress = Callable[[int], None] | None
"""Called with the number of tokens that have been scored."""


def flags_of(name: str) -> dict[str, Any]:
    """The flags of a format, or of several with a plus between them. Raises `ValueError` for an unknown one,
    and for two that set the same flag."""
    flags: dict[str, Any] = {}
    for part in name.split("+"):
        if part not in FORMATS:
            raise ValueError(f"no format {part!r}; there are {', '.join(FORMATS)}, and sums: fp8+fp8-kv")
        (flag,) = FORMATS[part]
        if flag in flags:
            raise ValueError(f"format {name}: {flag} is given twice")
        flags |= FORMATS[part]
    return flags


@dataclass(frozen=True)
class Inputs:
    """The questions and texts that a model is measured on; either may be empty."""

    questions: Sequence[Question]
    texts: Sequence[list[int]]  # token ids; each text is scored from its second token on

    def __post_init__(self) -> None:
        if not self.questions and not self.num_tokens:
            raise ValueError("there is nothing to measure: no question, and no text of two or more tokens")

    @property
    def num_tokens(self) -> int:
        """The number of tokens that get a log-probability."""
        return sum(len(text) - 1 for text in self.texts)


@dataclass(frozen=True)
class AccuracyCase:
    name: str
    flags: dict[str, Any]  # of the engine

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class AccuracyResult:
    case: AccuracyCase
    answers: list[str]
    exact: float | None  # share of the questions answered exactly; None: no questions
    logprobs: list[float]  # of each scored token
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability; None: no text."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs)) if self.logprobs else None

    def compared_with(self, baseline: AccuracyResult) -> Loss:
        pairs = list(zip(self.logprobs, baseline.logprobs, strict=True))
        same = [ours == theirs for ours, theirs in zip(self.answers, baseline.answers, strict=True)]
        return Loss(
            exact=None if self.exact is None or baseline.exact is None else baseline.exact - self.exact,
            same_answers=sum(same) / len(same) if same else None,
            perplexity=math.exp(sum(theirs - ours for ours, theirs in pairs) / len(pairs)) - 1
            if pairs
            else None,
            logprob=sum(abs(ours - theirs) for ours, theirs in pairs) / len(pairs) if pairs else None,
        )

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | {"perplexity": self.perplexity, "num_questions": len(self.answers)}
        return found | {"num_tokens": len(found.pop("logprobs"))}


@dataclass(frozen=True)
class Loss:
    """The loss of a format compared with the unquantized model; None: not measured."""

    exact: float | None  # share of questions; 0.01 is one point
    same_answers: float | None  # share of the answers that are the same text, right or wrong
    perplexity: float | None  # 0.01: the perplexity is 1.01 times as large
    logprob: float | None  # mean absolute change of a token's log-probability


def measure(case: AccuracyCase, inputs: Inputs, on_progress: OnProgress = None) -> AccuracyResult:
    """Run the questions and the texts through an engine with the case's flags."""
    from diptych.shared.engine.llm import LLM

    llm = LLM(**case.flags)
    answers = engine_answers(llm)([question.messages for question in inputs.questions])
    exact = score(lambda _: answers, list(inputs.questions)).exact if inputs.questions else None
    result = AccuracyResult(
        case,
        answers,
        exact,
        score_texts(llm, inputs.texts, on_progress),
        sum(weight.numel() * weight.element_size() for weight in llm.assembly.model.parameters()),
        llm.assembly.kv_pool.num_bytes_per_token,
    )
    del llm
    gc.collect()  # the next engine needs the device's memory
    return result


def score_texts(llm: LLM, texts: Sequence[list[int]], on_progress: OnProgress = None) -> list[float]:
    """The log-probabilities of all tokens but the first of each text, one list for all. Raises `RuntimeError`
    for a text that the engine could not compute."""
    collectors = [llm.submit(text, TEACHER_FORCED)[0] for text in texts if len(text) > 1]
    while not all(collector.is_finished for collector in collectors) and llm.step():
        if on_progress is not None:
            on_progress(sum(c.num_prompt_tokens - 1 for c in collectors if c.is_finished))
    logprobs: list[float] = []
    for collector in collectors:
        if not isinstance(collector.finish_reason, FinishLength):
            raise RuntimeError(f"a text of {collector.num_prompt_tokens} tokens: {collector.finish_reason}")
        logprobs += [token.logprob for token in collector.input_logprobs if token.logprob is not None]
    return logprobs


def chunks_of(ids: list[int], size: int) -> list[list[int]]:
    """Cut a long text into texts of `size` tokens; the last may be shorter. Raises `ValueError` for a size
    below 2: the first token of a chunk has nothing before it."""
    if size < 2:
        raise ValueError(f"chunks must have at least 2 tokens, got {size}")
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def chats_of(questions: Iterable[Question], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of chats: questions with their right answers."""
    return [
        tokenizer.chat(
            [*question.messages, {"role": "assistant", "content": question.answer}],
            add_generation_prompt=False,
        )
        for question in questions
    ]


def built_in_inputs(tokenizer: Tokenizer, num_questions: int, num_texts: int | None = None) -> Inputs:
    """Held-out questions, and `num_texts` of them (default: all) with their right answers as texts."""
    questions = held_out_questions(max(num_questions, num_texts or 0))
    texts = questions[: num_questions if num_texts is None else num_texts]
    return Inputs(questions[:num_questions], chats_of(texts, tokenizer))
