"""What a lab shows: a few requests on a real engine, and what its user sees. Each scene takes a function that
starts the engine with some flags, and gives rows for a table and whether they are as they should be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from diptych.shared.engine.llm import LLM
from diptych.shared.types import GenerateOutput, SamplingParams

Start = Callable[..., LLM]

QUESTIONS = (
    "What is 12 + 30?",
    "Count from 3 to 20.",
    "Otto is a baker. Otto lives in Lima. Write a JSON record about Otto.",
    "Mara lives in Bergen. Mara works as a baker. In which city does Mara live?",
)
FILLER = "Bo has the blue drum. Ines walked to the harbour. Otto bought 12 eggs. "


@dataclass
class Scene:
    """`rows`: (heading, values), a column for each name in `columns`. `is_right`: no symptom."""

    columns: tuple[str, ...]
    is_right: bool
    rows: Sequence[tuple[str, ...]] = ()


def starter(**fixed: Any) -> Start:
    """Starts engines on the CPU in float32, where equal work has equal results."""
    return partial(LLM, "tiny-dense", panel="reference", device="cpu", dtype="float32", **fixed)


def prompt(llm: LLM, question: str) -> list[int]:
    found = llm.chat_prompt([{"role": "user", "content": question}])
    assert isinstance(found, list)
    return found


def answers(
    llm: LLM, questions: tuple[str, ...], num_tokens: int = 24, **params: Any
) -> list[GenerateOutput]:
    """Answers of all questions together, in one batch if the engine makes one of them."""
    prompts = [prompt(llm, question) for question in questions]
    found = llm.generate(prompts, progress=False, max_tokens=num_tokens, **{"temperature": 0.0, **params})
    assert isinstance(found, list)
    return found


def text_of(llm: LLM, question: str, num_tokens: int = 24, **params: Any) -> str:
    (answer,) = answers(llm, (question,), num_tokens, **params)
    return answer.text


def compared(columns: tuple[str, ...], rows: list[tuple[str, str, str]]) -> Scene:
    """A row is a heading and two texts that should be equal."""
    return Scene(columns, all(a == b for _, a, b in rows), list(rows))


def in_chunks(start: Start) -> Scene:
    """Prompts of several lengths, computed whole and in chunks of 64 tokens."""
    whole, chunked = start(), start(chunked_prefill_size=64)
    rows = []
    for repeats in (0, 4, 8):
        question = FILLER * repeats + QUESTIONS[3]
        label = f"{len(prompt(whole, question))} tokens"
        rows.append((label, text_of(whole, question), text_of(chunked, question)))
    return compared(("prompt", "computed whole", "in chunks of 64 tokens"), rows)


def two_tenants(start: Start) -> Scene:
    """The same question of two tenants, whose prefixes must not be shared."""
    llm = start()
    rows, cached = [], []
    for tenant in ("alice", "alice", "bob"):
        (answer,) = answers(llm, (QUESTIONS[3],), extra_key=tenant)
        cached.append(answer.num_cached_tokens)
        rows.append((tenant, answer.text, str(answer.num_cached_tokens)))
    return Scene(("tenant", "answer", "prompt tokens found in the cache"), cached[2] == 0, rows)


def alone_and_together(start: Start) -> Scene:
    """Three questions one by one, and the same three at once."""
    llm = start(disable_radix_cache=True)
    alone = [text_of(llm, question) for question in QUESTIONS[:3]]
    together = [answer.text for answer in answers(llm, QUESTIONS[:3])]
    columns = ("question", "asked alone", "asked in a batch of three")
    return compared(columns, [*zip(QUESTIONS, alone, together)])


def one_after_another(start: Start) -> Scene:
    """Questions one by one, beside the reference panel's answers."""
    llm, right = start(disable_radix_cache=True), starter()(disable_radix_cache=True)
    rows = [(question, text_of(llm, question), text_of(right, question)) for question in QUESTIONS]
    return compared(("question", "this engine", "reference panel"), rows)


def streamed_to_a_stop(start: Start) -> Scene:
    """A stream that ends before a stop string, piece by piece."""
    llm, stop, wanted = start(), '", "city', '{"name": "Otto", "job": "baker'
    pieces = llm.stream(prompt(llm, QUESTIONS[2]), max_tokens=40, temperature=0.0, stop=(stop,))
    text = "".join(piece.text for piece in pieces)
    columns = ("question", f"streamed, with stop={stop!r}", "what comes before the stop string")
    return compared(columns, [(QUESTIONS[2], text, wanted)])


def after_much_text(start: Start) -> Scene:
    """One question behind more and more text, beside the reference panel's answers."""
    llm, right = start(), starter()()
    rows = []
    for repeats in (0, 4, 40):
        question = FILLER * repeats + QUESTIONS[3]
        label = f"{len(prompt(llm, question))} tokens"
        rows.append((label, text_of(llm, question, 16), text_of(right, question, 16)))
    return compared(("prompt", "this engine", "reference panel"), rows)


def drawn_with_top_p(start: Start) -> Scene:
    """The first token of 200 draws at top_p = 0.5, beside the probabilities of the tokens."""
    llm, top_p, num_draws = start(), 0.5, 200
    (sure,) = next_tokens(llm, [{"return_logprob": True, "top_logprobs_num": 20}])
    drawn = next_tokens(llm, [{"top_p": top_p, "seed": seed} for seed in range(num_draws)])
    counts = Counter(answer.output_ids[0] for answer in drawn)
    rows, before, is_right = [], 0.0, True
    for token_id, logprob in sure.output_logprobs[0].top:
        if before >= top_p:
            break
        share = math.exp(logprob)
        before += share
        is_right &= counts[token_id] > 0 or share < 0.03
        assert llm.tokenizer is not None
        text = repr(llm.tokenizer.decode([token_id]))
        rows.append((text, f"{share:.3f}", f"{before:.3f}", str(counts[token_id])))
    columns = ("token", "probability", "sum so far", f"drawn, of {num_draws}, with top_p={top_p}")
    return Scene(columns, is_right, rows)


def next_tokens(llm: LLM, params: list[dict[str, Any]]) -> list[GenerateOutput]:
    """The token after one beginning of a text, for each set of parameters."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("Otto bought")
    each = [SamplingParams(max_new_tokens=1, temperature=1.0, **more) for more in params]
    found = llm.generate([ids] * len(each), each, progress=False)
    return found if isinstance(found, list) else [found]


def after_many_requests(start: Start) -> Scene:
    """Slots that are free or hold cached prefixes, after more and more requests, with nothing running."""
    llm = start(page_size=4, max_total_tokens=256)
    rows, free = [], []
    for round_number in range(3):
        answers(llm, QUESTIONS, num_tokens=16)
        parts = llm.assembly.parts
        free.append(parts.allocator.available_size() + parts.tree_cache.evictable_size())
        rows.append((str(4 * (round_number + 1)), str(free[-1]), "256"))
    return Scene(("requests so far", "free, or cached", "all slots"), set(free) == {256}, rows)


def seeded_beside_others(start: Start) -> Scene:
    """A seeded request alone, and in batches with others."""
    llm = start(disable_radix_cache=True)
    sampled = {"temperature": 2.5, "seed": 7, "ignore_eos": True}
    rows = []
    for others in ((), QUESTIONS[:1], QUESTIONS[1:3]):
        answer = answers(llm, (*others, QUESTIONS[3]), 12, **sampled)[-1]
        rows.append((f"in a batch of {len(others) + 1}" if others else "alone", answer.text))
    return Scene(("the same request, seed 7", "answer"), len({text for _, text in rows}) == 1, list(rows))


def twins(start: Start) -> Scene:
    """The same question of two users at the same moment, and another one beside them, in a small pool."""
    questions = (QUESTIONS[2], QUESTIONS[2], QUESTIONS[1])
    alone = [text_of(start(), question) for question in questions[:2]]
    llm = start(max_total_tokens=110, schedule_conservativeness=0.1)
    together = [answer.text for answer in answers(llm, questions)]
    rows = [(f"user {i + 1}: {questions[i]}", alone[i], together[i]) for i in range(2)]
    return compared(("", "on an idle engine", "both at the same moment, in a small pool"), rows)


def prompt_beside_long_answers(start: Start) -> Scene:
    """A long prompt in chunks while other answers grow and fill the pool."""
    llm = start(max_total_tokens=236, chunked_prefill_size=20, enable_mixed_chunk=True,
                schedule_conservativeness=0.1, disable_radix_cache=True)  # fmt: skip
    collectors = []
    for question in (*QUESTIONS[:2] * 2, FILLER * 6):
        num_tokens = 40 if question in QUESTIONS else 1
        params = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
        collectors += llm.submit(prompt(llm, question), params)
    error = ""
    try:
        while llm.step():
            pass
    except Exception as failure:  # any: a scene shows what a user of the engine sees
        error = f"{type(failure).__name__}: {failure}"
    rows = []
    for i, collector in enumerate(collectors):
        answer = collector.whole()
        how = "lost" if answer.finish_reason is None else type(answer.finish_reason).__name__
        rows.append((f"request {i + 1}", f"{len(answer.output_ids)} tokens", how))
    rows += [("the engine", "", error)] if error else []
    return Scene(("", "answer", "how it ended"), all(row[2] == "FinishLength" for row in rows), list(rows))


def a_popular_prompt(start: Start) -> Scene:
    """Prompt tokens found in a small cache, when every second request has the same prompt: of this engine,
    and of the reference panel."""
    rows, cached = [], []
    for name, llm in (("this engine", start(**SMALL_POOL)), ("reference panel", starter()(**SMALL_POOL))):
        for i in range(12):
            (answer,) = answers(llm, (FILLER * 3 + QUESTIONS[3],), 1)
            answers(llm, (f"{i} + {i}. {FILLER * 3}",), 1)
        cached.append(llm.stats().num_cached_tokens)
        rows.append((name, str(llm.stats().num_prompt_tokens), str(cached[-1]), answer.text))
    columns = ("", "prompt tokens", "found in the cache", "last answer")
    return Scene(columns, cached[0] >= cached[1], list(rows))


SMALL_POOL: dict[str, Any] = {"max_total_tokens": 320}
SCENES: dict[str, Callable[[Start], Scene]] = {
    scene.__name__: scene
    for scene in (
        alone_and_together, streamed_to_a_stop, after_much_text, drawn_with_top_p, in_chunks, two_tenants,
        after_many_requests, seeded_beside_others, one_after_another, twins, prompt_beside_long_answers,
        a_popular_prompt,
    )
}  # fmt: skip
