"""Checks of penalties: samples against the exact distribution, and greedy choices that a penalty changes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.distributions import WHY_FILTER, body_of, follows
from diptych.shared.tools.conformance.server.draws import Asked, Floats, changed_logits, choice_at
from diptych.shared.tools.conformance.server.logprob_tolerance import Tolerance
from diptych.shared.tools.conformance.server.same import num_outliers

PENALTIES = ("frequency_penalty", "presence_penalty")
LARGEST = 2.0  # of OpenAI's range
NUM_GREEDY = 32  # tokens of a greedy answer: enough for repetitions
LEAST_PROMPT = 6
NUM_TELLING = 8  # prompts whose first token depends on whether prompt tokens are counted
NUM_REPEATS = 6
NO_PENALTY = "no penalty"
PROMPT_TOO = "tokens of the prompt count too"
OUTPUT_ONLY = "only generated tokens count"


def other_rules(asked: Asked) -> dict[str, Asked]:
    """The rules of other servers. OpenAI's formula counts how often a token was sampled, so not in the
    prompt."""
    return {NO_PENALTY: Asked(), PROMPT_TOO: replace(asked, counted="prompt and output")}


def telling_prompts(context: Context, asked: Asked, other: Asked) -> list[list[int]]:
    """Beginnings of the prompts whose next token differs most between the two rules, by KL divergence."""
    found = []
    for prompt in context.prompts:
        rows = context.oracle.logits(prompt)
        for length in range(LEAST_PROMPT, len(prompt) + 1):
            beginning = prompt[:length]
            one, two = (
                choice_at(rows[length - 1], rule, beginning, [], 0.0).share + 1e-30 for rule in (asked, other)
            )
            found.append((float(two @ np.log(two / one)), beginning))
    return [prompt for _, prompt in heapq.nlargest(NUM_TELLING, found)]


@check(
    "sampling.penalties",
    "Frequency and presence penalties change the logits of generated tokens, as OpenAI's formula has it.",
    WHY_FILTER,
)
def penalties(context: Context) -> Iterator[Finding]:
    for name in PENALTIES:
        if not getattr(context.offers, name):
            yield Finding("not offered", context.offers.reason(name))
            continue
        fields: dict[str, Any] = {name: LARGEST}
        asked = Asked(**fields)
        rules = other_rules(asked)
        first = telling_prompts(context, asked, rules[PROMPT_TOO]) * NUM_REPEATS
        yield follows(context, asked, rules, first)


@check(
    "sampling.greedy_penalties",
    "At temperature 0, the best token is that of the logits with their penalties.",
    "Greedy answers fall into loops that a penalty should end.",
)
def greedy_penalties(context: Context) -> Iterator[Finding]:
    if not (context.offers.generated_ids and context.offers.token_id_prompts):
        yield Finding("not offered", "it needs prompts of token ids, and ids of generated tokens")
        return
    for name in PENALTIES:
        if not getattr(context.offers, name):
            yield Finding("not offered", context.offers.reason(name))
            continue
        fields: dict[str, Any] = {name: LARGEST}
        asked = Asked(**fields)
        body = {**body_of(context, asked), "temperature": 0.0}
        rules = {name: asked, **other_rules(asked)}
        choices = Choices()
        lengths = [(prompt, NUM_GREEDY) for prompt in context.prompts]
        lengths += [(prompt, 1) for prompt in telling_prompts(context, asked, rules[PROMPT_TOO])]
        for prompt, max_tokens in lengths:
            answer = context.server.complete(prompt, max_tokens=max_tokens, **body)[0]
            choices.add(context, prompt, list(answer.token_ids or ()), rules)
        yield choices.verdict(context.tolerance, name)


def best_tokens(
    tolerance: Tolerance, rows: Floats, asked: Asked, prompt: list[int], output: list[int]
) -> tuple[NDArray[np.int64], Floats]:
    """The best token of each row, [num], and the gap of each token to it beyond the tolerance, [num, vocab].
    `rows`: log-probabilities [num, vocab], the first row behind the prompt."""
    scores = np.empty_like(rows)
    for i, row in enumerate(rows):
        scores[i], _ = changed_logits(row, asked, prompt, output[:i])
    best = scores.argmax(axis=1)
    at = np.arange(len(rows))
    allowed = tolerance.max_error * (1.0 + np.abs(rows) / 3.0)
    return best, scores[at, best][:, None] - scores - allowed - allowed[at, best][:, None]


@dataclass
class Choices:
    """Counts of tokens of greedy answers, by rule. `wrong`: surely not the rule's choice. `telling`: the
    rule's choice surely differs from that of the requested rule. `followed`: the rule's choice, and surely
    not that of the requested rule."""

    num: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    telling: Counter[str] = field(default_factory=Counter)
    followed: Counter[str] = field(default_factory=Counter)

    def add(self, context: Context, prompt: list[int], output: list[int], rules: dict[str, Asked]) -> None:
        """Count the tokens of an answer. `rules`: the requested one first."""
        rows = context.oracle.logprobs([*prompt, *output])[len(prompt) - 1 : -1]
        at = np.arange(len(output))
        self.num += len(output)
        right: Any = np.empty(0)
        is_wrong: Any = np.empty(0)
        for i, (name, rule) in enumerate(rules.items()):
            best, excess = best_tokens(context.tolerance, rows, rule, prompt, output)
            is_other = excess[at, output] > 0
            if i == 0:
                right, is_wrong = best, is_other
            self.wrong[name] += int(is_other.sum())
            self.telling[name] += int((excess[at, right] > 0).sum())
            self.followed[name] += int((is_wrong & ~is_other).sum())

    def verdict(self, tolerance: Tolerance, name: str) -> Finding:
        what = f"{name} {LARGEST} at temperature 0"
        others = [rule for rule in self.telling if rule != name]
        evidence = {f"tokens that tell it from: {rule}": self.telling[rule] for rule in others}
        for rule in others:
            if self.followed[rule] > num_outliers(tolerance, self.telling[rule]):
                evidence |= {"tokens of the other rule": self.followed[rule]}
                sentence = f"{what}: the choices follow another rule"
                return Finding("fails", sentence, name, rule, evidence, self.num)
        if self.wrong[name] > num_outliers(tolerance, self.num):
            sentence = f"{what}: tokens that are not the best"
            return Finding("fails", sentence, 0, self.wrong[name], evidence, self.num)
        return Finding("holds", what, evidence=evidence, num_cases=self.num)


@check(
    "sampling.repetition_penalty",
    "repetition_penalty divides positive logits of repeated tokens and multiplies negative ones.",
    WHY_FILTER,
)
def repetition_penalty(context: Context) -> Finding:
    if not context.offers.repetition_penalty:
        return Finding("not offered", context.offers.reason("repetition_penalty"))
    value = 0.6  # below one, repetitions are likely, so that counts matter
    output_only = Asked(repetition_penalty=value, counted="output")
    found = follows(context, Asked(repetition_penalty=value), {NO_PENALTY: Asked(), OUTPUT_ONLY: output_only})
    # OpenAI does not define this parameter, so SGLang's rule is accepted as well as Hugging Face's.
    return (
        replace(found, status="holds", what=f"{found.what}: {OUTPUT_ONLY}")
        if found.actual == OUTPUT_ONLY
        else found
    )
