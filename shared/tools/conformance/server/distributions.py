"""Checks of sampling against the exact distribution: temperature, filters, logit_bias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Answer, Refused
from diptych.shared.tools.conformance.server.draws import ALPHA, MIN_DRAWS, Asked, Draws
from diptych.shared.tools.conformance.server.same import OWN_SLACK

TOKENS_OF_A_DRAW = 48
"""Answers this long: their tokens are draws from as many distributions."""
MAX_ROUNDS = 8
"""Without ignore_eos: llama.cpp takes end tokens out before the filters, vLLM goes on after them."""
Text = tuple[list[int], list[int], Any]  # prompt, output, and the logits before each token of the output
WHY_FILTER = "Answers of a filter that is not applied, or wrongly, look right one by one."


def body_of(context: Context, asked: Asked) -> dict[str, Any]:
    """The fields of a request with this server's names, with its default filters disabled."""
    offers = context.offers
    body = {"logprobs": max(1, min(asked.top_k, offers.num_top_logprobs)), **asked.body()}
    if offers.top_k and not asked.top_k:
        body["top_k"] = -1  # llama.cpp keeps 40 by default, vLLM what the model's generation_config has
    if offers.min_p and not asked.min_p:
        body["min_p"] = 0.0
    if offers.kind == "llamacpp":  # by default, penalties are of the last 64 tokens
        body["repeat_last_n"] = context.oracle.context_len
        if "repetition_penalty" in body:
            body["repeat_penalty"] = body.pop("repetition_penalty")
    return body


def drawn(
    context: Context, asked: Asked, rivals: Mapping[str, Asked], first: Sequence[list[int]] = ()
) -> tuple[Draws, list[Text]]:
    """Draws of several answers, and the answers. `first`: additional prompts for which only one token is
    drawn. Raises `Refused`."""
    body = body_of(context, asked)

    def ask(prompt: list[int], max_tokens: int, seed: int) -> Answer:
        fields = {"seed": seed} if context.offers.seed else {}
        return context.server.complete(prompt, max_tokens=max_tokens, **body, **fields)[0]

    draws, texts = Draws(context.rng, context.tolerance, context.oracle.eos_token_ids, rivals), []
    asks = [(prompt, 1) for prompt in first]
    for _ in range(MAX_ROUNDS):  # answers may end early
        num = math.ceil((context.limits.num_draws + len(first) - len(draws.places)) / TOKENS_OF_A_DRAW)
        if num <= 0 or draws.too_many_impossible or draws.outside:
            break
        asks += [(context.prompts[i % len(context.prompts)], TOKENS_OF_A_DRAW) for i in range(num)]
        calls = [partial(ask, *each, context.rng.randrange(2**31)) for each in asks]
        answers = context.server.at_once(calls, context.limits.concurrency)
        for (prompt, _), answer in zip(asks, answers):
            output = list(answer.token_ids or ())
            draws.outside += outside_own_top_k(answer, asked.top_k, context.oracle.eos_token_ids)
            if output:
                logits = context.oracle.logits([*prompt, *output])[len(prompt) - 1 : -1]
                draws.add(logits, asked, prompt, output)
                texts.append((prompt, output, logits))
        asks = []
    return draws, texts


def outside_own_top_k(answer: Answer, top_k: int, eos_token_ids: Set[int]) -> list[dict[str, Any]]:
    """Tokens that top_k filters out by the server's own log-probabilities: it reports top_k likelier ones.
    This needs no tolerance, as the values and the filter have the same logits. End tokens do not count:
    llama.cpp takes them out before top_k. Equally likely tokens may be in any order."""
    found: list[dict[str, Any]] = []
    for i, (top, chosen) in enumerate(zip(answer.top_logprobs or (), answer.logprobs or ())):
        likelier = [v for token, v in top.items() if v > chosen + OWN_SLACK and token not in eos_token_ids]
        if 0 < top_k <= len(likelier):
            found.append({"position": i, "logprob": chosen, "likelier": sorted(likelier, reverse=True)})
    return found


def follows(
    context: Context, asked: Asked, others: Mapping[str, Asked], first: Sequence[list[int]] = ()
) -> Finding:
    """Whether a server's draws follow the distribution. `others`: rules, by name, that they may follow
    instead; the finding names the rule that fits. `first`: as in `drawn`."""
    if not (context.offers.generated_ids and context.offers.token_id_prompts):
        return Finding("not offered", "it needs prompts of token ids, and ids of generated tokens")
    try:
        # If few tokens change, a test against each alternative rule is more sensitive than tests of all
        # tokens.
        draws, texts = drawn(context, asked, others if asked.changes_logits else {}, first)
    except Refused as error:
        if error.status >= 500:
            raise
        return Finding("not offered", f"{asked.body()} is refused: {error}")
    what = ", ".join(f"{name} {value}" for name, value in asked.body().items())
    num = len(draws.places)
    evidence: dict[str, Any] = {"draws": num, "left out": draws.num_left_out}
    if draws.outside:
        what = f"{what}: a token was drawn although the server itself reports {asked.top_k} likelier ones"
        return Finding("fails", what, 0, len(draws.outside), evidence | draws.outside[0], num)
    if draws.too_many_impossible:
        example = draws.impossible[0]
        evidence |= {"impossible": len(draws.impossible)}
        return Finding(
            "fails", f"{what}: a token that is filtered out was drawn", 0.0, example, evidence, num
        )
    if num < MIN_DRAWS:
        return Finding("not offered", f"{what}: {num} draws are too few", evidence=evidence)
    p_value = draws.p_value()
    evidence |= {"p-value": p_value, "alpha": ALPHA, "bins": draws.counts()}
    if p_value >= ALPHA:
        return Finding("holds", what, evidence=evidence, num_cases=num)
    for name, other in others.items():
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


def raised(context: Context, odds: float) -> dict[int, float]:
    """A logit bias with which ten tokens together have these odds against all others, behind the first
    prompt."""
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
