"""Checks of seeds, greedy choices, and consistent log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from diptych.shared.tools.conformance.server.checks import Context, Finding, Status, check
from diptych.shared.tools.conformance.server.client import Answer
from diptych.shared.tools.conformance.server.draws import Floats
from diptych.shared.tools.conformance.server.same import (
    NUM_TOP,
    ask_prompt,
    greedy,
    is_own_best,
    num_outliers,
)

SURELY_DIFFERENT = math.log(1e-9)
MOST_OTHERS = 0.2
"""Share of near ties among the tokens of greedy answers. Correct servers had 0.4 % (tiny-dense in bfloat16),
2 % (in Q8_0) and 7 % (tiny-moe in bfloat16); samples at temperature 0.7 have 25 % and more."""
LEAST_TOKENS = 30
FAR = 8.0
"""Limits of the best token. A gap is the errors of two tokens; four times that is no outlier of a format (the
largest errors of correct servers are below two limits), but a wrong token."""


def sampled(context: Context, **params: Any) -> list[Answer]:
    """Answers with high entropy: two are equal by chance with a probability below 1e-9; see `distinct`."""
    prompt = context.prompts[min(2, len(context.prompts) - 1)]
    fields = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 24, "logprobs": 1, **params}
    if context.offers.ignore_eos:
        fields["ignore_eos"] = True
    return context.server.complete(ask_prompt(context, prompt), **fields)


def distinct(what: str, answers: list[Answer]) -> Finding:
    """Fails if all texts are the same although their probability is small."""
    texts = [answer.text for answer in answers]
    if len(set(texts)) > 1:
        return Finding("holds", what, num_cases=len(texts))
    surprise = sum(answers[0].logprobs or ()) * (len(answers) - 1)
    if answers[0].logprobs is not None and surprise > SURELY_DIFFERENT:
        return Finding("near tie", f"{what}: the text is too likely to tell", actual=texts[0])
    return Finding("fails", f"{what}: all {len(texts)} texts are the same", "different texts", texts[0])


@check(
    "sampling.same_seed", "The same seed gives the same answer.", "Users set seeds to repeat an experiment."
)
def same_seed(context: Context) -> Finding:
    if not context.offers.seed:
        return Finding("not offered", context.offers.reason("seed"))
    seeds = [context.rng.randrange(2**31) for _ in range(3)]
    sampled(context, seed=seeds[0])  # the prompt is cached from here on
    pairs = [(sampled(context, seed=seed)[0].text, sampled(context, seed=seed)[0].text) for seed in seeds]
    num_same = sum(first == second for first, second in pairs)
    evidence = {"seeds": seeds, "repeated": num_same}
    if num_same == len(pairs):
        return Finding("holds", "the same seed twice", evidence=evidence, num_cases=len(pairs))
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    # A draw near the boundary between two tokens may give either.
    status: Status = "near tie" if num_same == len(pairs) - 1 else "fails"
    return Finding(status, "the same seed gives another text", first, second, evidence, len(pairs))


@check("sampling.other_seed", "Other seeds give other answers.", "A pass@k of k equal answers is a pass@1.")
def other_seed(context: Context) -> Iterator[Finding]:
    if context.offers.seed:
        yield distinct("seeds 1, 2, 3", [sampled(context, seed=seed)[0] for seed in (1, 2, 3)])
    yield distinct("no seed, three times", [sampled(context)[0] for _ in range(3)])
    if context.offers.n:
        yield distinct("n=3 choices", sampled(context, n=3))
        if context.offers.seed:
            yield distinct("n=3 choices of one seed", sampled(context, n=3, seed=5))


@check(
    "sampling.greedy",
    "Temperature 0 gives the most likely token, or one of a near tie.",
    "Evaluations are greedy.",
)
def greedy_choice(context: Context) -> Iterator[Finding]:
    if not (context.offers.generated_ids and context.offers.token_id_prompts):
        yield Finding("not offered", "it needs prompts of token ids, and ids of generated tokens")
        return
    num, others = 0, []  # tokens that are not the reference's best
    for prompt in context.prompts:
        answer = greedy(context, prompt, context.limits.max_tokens)
        ids = list(answer.token_ids or ())
        rows = context.oracle.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
        own = rows[np.arange(len(ids)), ids]
        gaps = rows.max(axis=1) - own
        num += len(ids)
        others += [i for i in range(len(ids)) if gaps[i] > 0]
        yield judge_greedy(context, answer, rows, gaps, own)
    share = len(others) / max(num, 1)
    if num >= LEAST_TOKENS and share > MOST_OTHERS:
        what = "share of tokens that are not the reference's best"
        yield Finding("fails", what, f"at most {MOST_OTHERS}", share, {"tokens": num})


def judge_greedy(context: Context, answer: Answer, rows: Floats, gaps: Floats, own: Floats) -> Finding:
    """`rows`: the reference's log-probabilities; `own`: those of the chosen tokens; `gaps`: to the best."""
    ids, tolerance = list(answer.token_ids or ()), context.tolerance
    beyond = np.flatnonzero(gaps > 2 * np.array([tolerance.allowed(value) for value in own]))
    far = np.flatnonzero(gaps > FAR * np.array([tolerance.allowed(value) for value in own + gaps]))
    evidence = {"largest gap": float(gaps.max(initial=0.0)), "limit": 2 * tolerance.max_error}
    if answer.logprobs is not None and len(answer.logprobs) == len(ids):
        worse = [i for i in range(len(ids)) if not is_own_best(answer, i)]
        if worse:
            what = f"token {worse[0]} is not the most likely one by the server's own log-probabilities"
            best = max(answer.top_logprobs[worse[0]].values()) if answer.top_logprobs else None
            return Finding("fails", what, best, answer.logprobs[worse[0]], evidence, len(ids))
    if far.size or len(beyond) > num_outliers(tolerance, len(ids)):
        at = int(far[0] if far.size else beyond[0])
        what = f"token {at} is not the most likely one, by {gaps[at]:.3g}"
        return Finding("fails", what, int(rows[at].argmax()), ids[at], evidence, len(ids))
    if (gaps > 0).any():
        return Finding("near tie", "a token within the tolerance of the best one", evidence=evidence)
    return Finding("holds", "greedy choices", evidence=evidence, num_cases=len(ids))


@check(
    "sampling.top_logprobs",
    "top_logprobs has as many tokens as asked for, sorted, the chosen one with its own value, sum at most 1.",
    "Distillation and uncertainty estimates read these lists.",
)
def top_logprobs(context: Context) -> Iterator[Finding]:
    if context.offers.num_top_logprobs < 2:
        yield Finding("not offered", "the server reports no alternatives")
        return
    num = min(NUM_TOP, context.offers.num_top_logprobs)
    for prompt in context.prompts[:2]:
        answer = greedy(context, prompt, context.limits.max_tokens)
        for i, top in enumerate(answer.top_logprobs or ()):
            yield _consistent(answer, i, top, num)


def _consistent(answer: Answer, i: int, top: dict[int | str, float], num: int) -> Finding:
    assert answer.logprobs is not None
    values, chosen = list(top.values()), answer.logprobs[i]
    key = answer.token_ids[i] if answer.token_ids else answer.tokens[i]
    evidence = {"position": i, "chosen": chosen}
    if not num <= len(top) <= num + 1 and isinstance(next(iter(top), None), int):  # texts may be equal
        return Finding("fails", f"{num} top_logprobs were asked for", num, len(top), evidence)
    if values[:num] != sorted(values[:num], reverse=True):
        return Finding("fails", "top_logprobs is not sorted", sorted(values, reverse=True), values, evidence)
    if key not in top and isinstance(key, int):
        return Finding("fails", "the chosen token is not in top_logprobs", key, list(top), evidence)
    if key in top and top[key] != chosen:
        return Finding("fails", "the chosen token has two log-probabilities", top[key], chosen, evidence)
    if chosen < max(values) - 1e-6 and isinstance(key, int):
        return Finding(
            "fails", "the greedy choice is not the first of top_logprobs", max(values), chosen, evidence
        )
    total = sum(math.exp(value) for value in values)
    if total > 1 + 1e-3 or max(values) > 1e-6:
        return Finding("fails", "probabilities of top_logprobs have a sum above 1", 1.0, total, evidence)
    return Finding("holds", "top_logprobs")


@check(
    "sampling.logprob_temperature",
    "Reported log-probabilities are those before temperature, or else those after it.",
    "Servers differ, and a client must know which.",
)
def logprob_temperature(context: Context) -> Finding:
    if not (
        context.offers.generated_ids
        and context.offers.token_id_prompts
        and context.offers.completion_logprobs
    ):
        return Finding("not offered", "it needs prompts of token ids, ids and logprobs of generated tokens")
    prompt, value = context.prompts[min(2, len(context.prompts) - 1)], 1.5
    answer = sampled(context, temperature=value)[0]
    ids = list(answer.token_ids or ())
    rows = context.oracle.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
    hot = rows / value
    hot -= np.log(np.exp(hot).sum(axis=1, keepdims=True))
    reported = np.array(answer.logprobs)
    chosen = np.arange(len(ids)), ids
    allowed = context.tolerance.mean_error * 2
    errors = {
        "before": float(np.abs(rows[chosen] - reported).mean()),
        "after": float(np.abs(hot[chosen] - reported).mean()),
    }
    name = min(errors, key=lambda each: errors[each])
    if errors[name] <= allowed:
        return Finding("holds", f"log-probabilities are those {name} temperature", evidence=errors)
    return Finding("fails", f"neither, at temperature {value}: mean error", allowed, errors[name], errors)
