"""Sampling against the exact distribution, seeds, greedy choices, and consistent log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shared.conformance.server.checks import Context, Finding, Status, check
from shared.conformance.server.client import Answer, Refused
from shared.conformance.server.draws import ALPHA, MIN_DRAWS, Asked, Draws
from shared.conformance.server.same import NUM_TOP, ask_prompt, greedy, num_outliers

TOKENS_OF_A_DRAW = 48
"""Answers this long: their tokens are draws from as many distributions."""
MAX_ROUNDS = 8
"""Without ignore_eos: llama.cpp takes end tokens out before the filters, vLLM goes on after them."""
Text = tuple[list[int], list[int], Any]  # prompt, output, and the logits before each token of the output
WHY_FILTER = "Answers of a filter that is not applied, or wrongly, look right one by one."
OUTPUT_ONLY = "only generated tokens count"
SURELY_DIFFERENT = math.log(1e-9)


def drawn(context: Context, asked: Asked) -> tuple[Draws, list[Text]]:
    """Draws of several answers, and the answers. Raises `Refused`."""
    offers, num_draws = context.offers, context.limits.num_draws
    body = {"max_tokens": TOKENS_OF_A_DRAW, "logprobs": 1, **asked.body()}
    if offers.top_k and not asked.top_k:
        body["top_k"] = -1  # llama.cpp keeps 40 by default, vLLM what the model's generation_config has
    if offers.min_p and not asked.min_p:
        body["min_p"] = 0.0
    if offers.kind == "llamacpp":  # by default, penalties are of the last 64 tokens
        body["repeat_last_n"] = context.oracle.context_len
        if "repetition_penalty" in body:
            body["repeat_penalty"] = body.pop("repetition_penalty")

    def ask(prompt: list[int]) -> list[int]:
        seed = {"seed": context.rng.randrange(2**31)} if offers.seed else {}
        return list(context.server.complete(prompt, **body, **seed)[0].token_ids or ())

    draws, texts = Draws(context.rng, context.tolerance, context.oracle.eos_token_ids), []
    for _ in range(MAX_ROUNDS):  # answers may end early
        num = math.ceil((num_draws - len(draws.places)) / TOKENS_OF_A_DRAW)
        if num <= 0 or draws.too_many_impossible:
            break
        prompts = [context.prompts[i % len(context.prompts)] for i in range(num)]
        answers = context.server.at_once(
            [partial(ask, prompt) for prompt in prompts], context.limits.concurrency
        )
        for prompt, output in zip(prompts, answers):
            if output:
                logits = context.oracle.logits([*prompt, *output])[len(prompt) - 1 : -1]
                draws.add(logits, asked, prompt, output)
                texts.append((prompt, output, logits))
    return draws, texts


def follows(context: Context, asked: Asked, others: dict[str, Asked] | None = None) -> Finding:
    """Whether a server's draws follow the distribution. `others`: by name, what else they may follow; it is
    named if they do not."""
    if not (context.offers.generated_ids and context.offers.token_id_prompts):
        return Finding("not offered", "it needs prompts of token ids, and ids of generated tokens")
    try:
        draws, texts = drawn(context, asked)
    except Refused as error:
        if error.status >= 500:
            raise
        return Finding("not offered", f"{asked.body()} is refused: {error}")
    what = ", ".join(f"{name} {value}" for name, value in asked.body().items())
    num = len(draws.places)
    evidence: dict[str, Any] = {"draws": num, "left out": draws.num_left_out}
    if draws.too_many_impossible:
        first = draws.impossible[0]
        evidence |= {"impossible": len(draws.impossible)}
        return Finding("fails", f"{what}: a token that is filtered out was drawn", 0.0, first, evidence, num)
    if num < MIN_DRAWS:
        return Finding("not offered", f"{what}: {num} draws are too few", evidence=evidence)
    p_value = draws.p_value()
    evidence |= {"p-value": p_value, "alpha": ALPHA, "bins": draws.counts()}
    if p_value >= ALPHA:
        return Finding("holds", what, evidence=evidence, num_cases=num)
    for name, other in (others or {}).items():
        again = Draws(context.rng, draws.tolerance, draws.excluded)
        for prompt, output, logits in texts:
            again.add(logits, other, prompt, output)
        if not again.too_many_impossible and len(again.places) >= MIN_DRAWS and again.p_value() > 1e-3:
            return Finding("fails", f"{what}: the draws follow another rule", what, name, evidence, num)
    expected = [round(num / len(draws.counts()))] * len(draws.counts())
    return Finding("fails", f"{what}: the draws do not follow it", expected, draws.counts(), evidence, num)


@check(
    "sampling.temperature", "Draws follow softmax(logits / temperature).", "Too hot or too cold is not seen."
)
def temperature(context: Context) -> Iterator[Finding]:
    for value in (1.0, 0.7, 1.5):
        others = {f"temperature {t:g}": Asked(t) for t in (0.5, 0.7, 1.0, 1.2, 1.5, 2.0) if t != value}
        yield follows(context, Asked(value), others | {"temperature squared": Asked(value**2)})


@check("sampling.top_k", "Draws follow the distribution over the top_k most likely tokens.", WHY_FILTER)
def top_k(context: Context) -> Finding:
    if not context.offers.top_k:
        return Finding("not offered", context.offers.reason("top_k"))
    others = {"no top_k": Asked(1.5), "one fewer": Asked(1.5, top_k=4), "one more": Asked(1.5, top_k=6)}
    return follows(context, Asked(1.5, top_k=5), others)


@check(
    "sampling.top_p", "Draws follow the distribution over the fewest tokens with a mass of top_p.", WHY_FILTER
)
def top_p(context: Context) -> Finding:
    return follows(context, Asked(top_p=0.7), {"no top_p": Asked()})


@check(
    "sampling.min_p", "Draws follow the distribution over tokens of min_p times the best one's.", WHY_FILTER
)
def min_p(context: Context) -> Finding:
    if not context.offers.min_p:
        return Finding("not offered", context.offers.reason("min_p"))
    return follows(context, Asked(min_p=0.1), {"no min_p": Asked()})


@check(
    "sampling.penalties",
    "Frequency and presence penalties change the logits of generated tokens, as OpenAI's formula has it.",
    WHY_FILTER,
)
def penalties(context: Context) -> Iterator[Finding]:
    for name, value in (("frequency_penalty", 1.0), ("presence_penalty", 2.0)):
        if not getattr(context.offers, name):
            yield Finding("not offered", context.offers.reason(name))
            continue
        fields: dict[str, Any] = {name: value}
        others = {
            f"no {name}": Asked(),
            "tokens of the prompt count too": replace(Asked(**fields), counted="prompt and output"),
        }
        yield follows(context, Asked(**fields), others)


@check(
    "sampling.repetition_penalty",
    "repetition_penalty divides positive logits of repeated tokens and multiplies negative ones.",
    WHY_FILTER,
)
def repetition_penalty(context: Context) -> Finding:
    if not context.offers.repetition_penalty:
        return Finding("not offered", context.offers.reason("repetition_penalty"))
    value = 0.6  # below one, repetitions are likely, so that there is something to count
    output_only = Asked(repetition_penalty=value, counted="output")
    found = follows(
        context, Asked(repetition_penalty=value), {"no penalty": Asked(), OUTPUT_ONLY: output_only}
    )
    # No document of OpenAI has this parameter: SGLang's rule is as good as that of Hugging Face.
    return (
        replace(found, status="holds", what=f"{found.what}: {OUTPUT_ONLY}")
        if found.actual == OUTPUT_ONLY
        else found
    )


def raised(context: Context, odds: float) -> dict[int, float]:
    """A bias that gives ten tokens together these odds against all others, behind the first prompt."""
    first = context.oracle.logprobs(context.prompts[0])[-1]
    order = [int(token) for token in np.argsort(-first) if int(token) not in context.oracle.eos_token_ids]
    tokens = order[10:30:2]
    bias = math.log(odds) - math.log(float(np.exp(first[tokens]).sum()))
    return dict.fromkeys(tokens, round(min(max(bias, 1.0), 20.0), 2))


@check("sampling.logit_bias", "logit_bias is added to the logits, and -100 bans a token.", WHY_FILTER)
def logit_bias(context: Context) -> Finding:
    if not context.offers.logit_bias:
        return Finding("not offered", context.offers.reason("logit_bias"))
    best = int(context.oracle.logprobs(context.prompts[0])[-1].argmax())
    bias = raised(context, odds=4.0) | {best: -100.0}
    others = {"no logit_bias": Asked(), "the other sign": Asked(logit_bias={t: -b for t, b in bias.items()})}
    return follows(context, Asked(logit_bias=bias), others)


def sampled(context: Context, **params: Any) -> list[Answer]:
    """Answers of much entropy: two of them are the same by chance less than once in 1e9, see `distinct`."""
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
    # One draw near the border of two tokens may fall on either side.
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
    tolerance = context.tolerance
    limit = 2 * tolerance.max_error
    for prompt in context.prompts:
        ids = list(greedy(context, prompt, context.limits.max_tokens).token_ids or ())
        rows = context.oracle.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
        gaps = rows.max(axis=1) - rows[np.arange(len(ids)), ids]
        limits = [2 * tolerance.allowed(value) for value in rows[np.arange(len(ids)), ids]]
        beyond = np.flatnonzero(gaps > np.array(limits))
        evidence = {"largest gap": float(gaps.max(initial=0.0)), "limit": limit}
        if len(beyond) > num_outliers(tolerance, len(ids)):
            at = int(beyond[0])
            what = f"token {at} is not the most likely one, by {gaps[at]:.3g}"
            yield Finding("fails", what, int(rows[at].argmax()), ids[at], evidence, len(ids))
        elif (gaps > 0).any():
            yield Finding("near tie", "a token within the tolerance of the best one", evidence=evidence)
        else:
            yield Finding("holds", "greedy choices", evidence=evidence, num_cases=len(ids))


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
