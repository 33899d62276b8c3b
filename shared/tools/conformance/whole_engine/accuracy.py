"""Level L6: the score of the built-in models on held-out questions, for each setting of the engine."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.whole_engine.formats import Loss
from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import engine_answers, score

NUM_QUESTIONS = 40  # two of each kind
LOWEST_SCORE = 0.95
LARGEST_LOSS = 0.01  # one point: with 40 questions, not one answer may be lost
STEPS_BETWEEN_RETRACTIONS = 8

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "radix off": {"disable_radix_cache": True},
    "chunk 16": {"chunked_prefill_size": 16},
    "chunk 16, mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "page 16": {"page_size": 16},
    "small pool": {"max_total_tokens": 1280, "page_size": 4},
}


def exact_match(model: str, num_questions: int = NUM_QUESTIONS, **flags: Any) -> float:
    """Share of held-out questions answered exactly, greedily. In a small pool requests are retracted every
    few steps, in addition to retractions for lack of memory."""
    llm = LLM(model=model, **{"max_total_tokens": 16384, **flags})

    def retract_one(num_steps: int) -> None:
        running = llm.scheduler.state().running
        if "max_total_tokens" in flags and num_steps % STEPS_BETWEEN_RETRACTIONS == 0 and running:
            llm.scheduler.retract(running[-1].rid)

    found = score(engine_answers(llm, retract_one), held_out_questions(num_questions)).exact
    if "max_total_tokens" in flags:
        assert llm.stats().num_retractions >= 10
    return found


class Limit(NamedTuple):
    """The largest loss allowed for a format, compared with the unquantized model, and the reason."""

    exact: float  # share of questions
    perplexity: float  # 0.01: one percent
    logprob: float  # mean absolute change of a token's log-probability
    reason: str


FORMAT_QUESTIONS = 50  # one answer is two points
NO_LIMIT = Limit(math.inf, math.inf, math.inf, "")
LIMITS: dict[str, Limit] = {
    "bf16": Limit(0.02, 0.002, 0.008, "every value is rounded to 8 bits, an error of at most 0.4 %"),
    "fp8": Limit(0.02, 0.003, 0.02, "weights and inputs have 4 bits, an error of at most 6 % of either sign"),
    "fp8-block": Limit(0.02, 0.003, 0.02, "as fp8; a scale for fewer values does not add bits"),
    "int8": Limit(0.02, 0.003, 0.02, "a step is 1/127 of the largest value of a channel or token"),
    "int4": Limit(0.04, 0.01, 0.06, "a step is 1/7 of the largest of 64 weights: 10 % of a typical one"),
    "nvfp4": Limit(0.04, 0.01, 0.05, "1 bit of mantissa: from 1 on an error of at most 20 %"),
    "fp8-kv": Limit(0.02, 0.003, 0.015, "K and V alone have 4 bits, and attention averages over tokens"),
}
"""Of the built-in models on held-out chats. The change of a log-probability is the sharpest of the three:
errors of both signs add up in it, while in perplexity they cancel. Its limit is about twice what the larger
of the two models loses (docs/samples/eval.txt, eval-moe.txt). Of exact match one answer of 50 may be lost,
and two with int4: a near tie of two tokens decides some answers."""


def excess(loss: Loss, limit: Limit) -> list[str]:
    """The parts of a loss that exceed the limit, as sentences."""
    found = []
    if loss.exact is not None and not loss.exact <= limit.exact + 1e-9:
        found.append(f"exact match falls by {loss.exact:.1%}, more than {limit.exact:.1%}")
    if loss.perplexity is not None and not loss.perplexity <= limit.perplexity:
        found.append(f"perplexity rises by {loss.perplexity:.2%}, more than {limit.perplexity:.2%}")
    if loss.logprob is not None and not loss.logprob <= limit.logprob:
        found.append(f"a log-probability changes by {loss.logprob:.4f}, more than {limit.logprob}")
    return found
