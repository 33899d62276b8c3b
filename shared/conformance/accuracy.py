"""Level L6: the score of the built-in models on held-out questions, by our own engine, however it is set."""

from __future__ import annotations

from typing import Any

from shared.engine.llm import LLM
from shared.tiny.corpus import held_out_questions
from shared.tiny.evaluate import MAX_NEW_TOKENS, score
from shared.tiny.exchange import Message
from shared.types import SamplingParams

NUM_QUESTIONS = 40  # two of each kind
LOWEST_SCORE = 0.95
LARGEST_LOSS = 0.01  # one point: with 40 questions, not one answer may be lost
GREEDY = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
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
    assert llm.tokenizer is not None

    def answer(chats: list[list[Message]]) -> list[str]:
        collectors = [llm.submit(llm.tokenizer.chat(chat), GREEDY)[0] for chat in chats]
        num_steps = 0
        while llm.step():
            num_steps += 1
            running = llm.scheduler.state().running
            if "max_total_tokens" in flags and num_steps % STEPS_BETWEEN_RETRACTIONS == 0 and running:
                llm.scheduler.retract(running[-1].rid)
        outputs = [collector.whole() for collector in collectors]
        if "max_total_tokens" in flags:
            assert sum(output.num_retractions for output in outputs) >= 10
        return [output.text for output in outputs]

    return score(answer, held_out_questions(num_questions)).exact
