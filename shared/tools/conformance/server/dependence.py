"""Checks that an answer depends on its request alone, not on batch, cache, load or chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Answer
from diptych.shared.tools.conformance.server.same import (
    ask_prompt,
    greedy,
    greedy_params,
    num_outliers,
    same_answer,
    same_answers,
)

WHY_BATCH = "Otherwise an answer changes with the traffic of others, and evaluations cannot be repeated."
WHY_CACHE = "A page of another text in the prefix cache gives fluent answers to another question."


def fresh(context: Context, length: int) -> list[int]:
    """Random tokens. A server that was checked with this seed may have them in its cache."""
    oracle = context.oracle
    ids: list[int] = []
    while len(ids) < length:
        token = context.rng.randrange(oracle.vocab_size)
        if token not in oracle.tokenizer.special_ids:
            ids.append(token)
    return ids


def hot(context: Context, prompt: Sequence[int], seed: int) -> dict[str, Any]:
    """Parameters of a sampling request in the same batch, with the penalties and filters that the server
    offers."""
    offers = context.offers
    extras: dict[str, Any] = {
        "seed": seed,
        "frequency_penalty": 1.0,
        "logit_bias": {str(prompt[0]): 5.0},
        "top_k": 9,
        "min_p": 0.05,
    }
    found = {name: value for name, value in extras.items() if getattr(offers, name)}
    return {"temperature": 1.5, "top_p": 0.8, "max_tokens": context.limits.max_tokens, **found}


@check("dependence.repeat", "A greedy request that is sent again gives the same answer.", WHY_BATCH)
def repeat(context: Context) -> Iterator[Finding]:
    for prompt in context.prompts[:2]:
        first = greedy(context, prompt, context.limits.max_tokens)
        again = greedy(context, prompt, context.limits.max_tokens)
        yield same_answer(context, first, again, "sent again")


@check(
    "dependence.batch_mates", "Other requests in the batch, of any parameters, change no answer.", WHY_BATCH
)
def batch_mates(context: Context) -> Iterator[Finding]:
    server, limits = context.server, context.limits
    prompt = context.prompts[0]
    alone = greedy(context, prompt, limits.max_tokens)
    lengths = (1, 3, limits.prompt_len, 2 * limits.prompt_len)
    mates = [fresh(context, lengths[i % len(lengths)]) for i in range(limits.concurrency - 1)]

    def mate(i: int) -> Answer:
        return server.complete(ask_prompt(context, mates[i]), **hot(context, mates[i], i))[0]

    calls = [partial(mate, i) for i in range(len(mates))]
    at = len(calls) // 2  # some start before it
    own = partial(greedy, context, prompt, limits.max_tokens)
    found = server.at_once([*calls[:at], own, *calls[at:]], limits.concurrency)
    yield same_answer(context, alone, found[at], f"alone, and beside {len(mates)} that sample")


@check(
    "dependence.concurrency", "Requests that run together give the answers that each gives alone.", WHY_BATCH
)
def concurrency(context: Context) -> Iterator[Finding]:
    limits = context.limits
    # Prompts of different lengths, two requests of each: equal ones share pages while both run.
    prompts = [list(each[: len(each) - 3 * i % len(each)]) for i, each in enumerate(context.prompts)]
    prompts = prompts[: max(limits.concurrency // 2, 2)]
    alone = [greedy(context, prompt, limits.max_tokens) for prompt in prompts]
    calls = [
        lambda prompt=prompt: greedy(context, prompt, limits.max_tokens) for prompt in [*prompts, *prompts]
    ]
    found = context.server.at_once(calls, limits.concurrency)
    pairs = []
    for i, answer in enumerate(found):
        what = f"prompt {i % len(prompts)} alone, and one of {len(found)} requests that run together"
        pairs.append((alone[i % len(prompts)], answer, what))
    yield from same_answers(context, pairs)


@check(
    "dependence.prefix_cache",
    "A prompt that is in the prefix cache gives the same answer as before.",
    WHY_CACHE,
)
def prefix_cache(context: Context) -> Iterator[Finding]:
    for length in (context.limits.prompt_len, 2 * context.limits.prompt_len + 1):
        prompt = fresh(context, length)
        cold = greedy(context, prompt, context.limits.max_tokens)
        yield same_answer(
            context, cold, greedy(context, prompt, context.limits.max_tokens), "computed, and cached"
        )


@check("dependence.shared_prefix", "A prompt whose first part is cached gives a correct answer.", WHY_CACHE)
def shared_prefix(context: Context) -> Iterator[Finding]:
    prefix = fresh(context, context.limits.prompt_len)
    greedy(context, prefix + fresh(context, 7), 4)
    for length in (1, 6, context.limits.prompt_len):
        prompt = prefix[: len(prefix) - length // 2] + fresh(context, length)
        answer = greedy(context, prompt, context.limits.max_tokens)
        yield like_the_oracle(context, prompt, answer, f"{length} tokens behind a cached prefix")


@check(
    "dependence.long_prompt",
    "A long prompt, which servers compute in chunks, gives a correct answer, also beside others.",
    "An error at the border of chunks or pages affects long prompts only.",
)
def long_prompt(context: Context) -> Iterator[Finding]:
    limits = context.limits
    num = limits.max_tokens
    length = min(limits.long_prompt_len, context.oracle.context_len - 2 * num - 1)
    prompt = fresh(context, length)
    short = context.prompts[0]
    alone = greedy(context, short, num)
    calls = [lambda: greedy(context, short, num), lambda: greedy(context, prompt, num)]
    beside, answer = context.server.at_once(calls, 2)
    yield like_the_oracle(context, prompt, answer, f"a prompt of {length} tokens beside a short one")
    yield same_answer(context, alone, beside, f"a short prompt alone, and beside one of {length} tokens")
    yield like_the_oracle(
        context, prompt, greedy(context, prompt, num), f"a prompt of {length} tokens, again"
    )
    if context.offers.echo_logprobs and context.offers.token_id_prompts:
        answer = greedy(context, prompt, 1, echo=True)
        values = tuple(value for value in (answer.prompt_logprobs or ())[1:] if value is not None)
        if len(values) == length - 1:
            scored = replace(answer, token_ids=tuple(prompt[1:]), logprobs=values)
            what = f"a prompt of {length} tokens, scored"
            yield like_the_oracle(context, prompt[:1], scored, what, is_greedy=False)


@check(
    "dependence.n",
    "Each of n choices is a correct answer of its own.",
    "Choices of one request share a prefix.",
)
def n(context: Context) -> Iterator[Finding]:
    if not context.offers.n:
        yield Finding("not offered", context.offers.reason("n"))
        return
    prompt = context.prompts[0]
    params = greedy_params(context, context.limits.max_tokens) | {"temperature": 1.0, "top_p": 1.0, "n": 3}
    for i, answer in enumerate(context.server.complete(ask_prompt(context, prompt), **params)):
        yield like_the_oracle(context, prompt, answer, f"choice {i} of 3", is_greedy=False)


def like_the_oracle(
    context: Context, prompt: Sequence[int], answer: Answer, what: str, is_greedy: bool = True
) -> Finding:
    """Log-probabilities of the answer's own tokens, and greedy choices, against the reference in float32."""
    if not answer.token_ids or answer.logprobs is None or not context.offers.token_id_prompts:
        return Finding(
            "not offered", "it needs prompts of token ids, and ids and logprobs of generated tokens"
        )
    ids = list(answer.token_ids)
    expected = context.oracle.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
    own = expected[np.arange(len(ids)), ids]
    tolerance = context.tolerance
    allowed = np.array([tolerance.allowed(value) for value in own])
    errors = np.nan_to_num(np.abs(np.array(answer.logprobs[: len(ids)]) - own), nan=np.inf)
    worst = int((errors / allowed).argmax())
    evidence = {"largest error": float(errors.max()), "position": worst, "allowed": float(allowed[worst])}
    if (errors > allowed).sum() > num_outliers(tolerance, len(ids)):
        actual = answer.logprobs[worst]
        return Finding(
            "fails", f"{what}: log-probability of token {worst}", float(own[worst]), actual, evidence
        )
    gaps = expected.max(axis=1) - own
    if is_greedy and (gaps > 2 * allowed).sum() > num_outliers(tolerance, len(ids)):
        at = int(gaps.argmax())
        best = int(expected[at].argmax())
        return Finding("fails", f"{what}: token {at} is not the most likely one", best, ids[at], evidence)
    return Finding("holds", what, evidence=evidence)
