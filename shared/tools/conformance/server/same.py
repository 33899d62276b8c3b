"""Compares two greedy answers of a server, which may differ only at near ties."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from diptych.shared.tools.conformance.server.answer import Answer, Top
from diptych.shared.tools.conformance.server.checks import Context, Finding, Status
from diptych.shared.tools.conformance.server.logprob_tolerance import Tolerance

NUM_TOP = 5
OWN_SLACK = 1e-6
LEAST_PAIRS = 4
MOST_TIES = 0.5
"""Share of near ties among LEAST_PAIRS or more pairs of answers. On correct servers about 1 % of pairs had
one (llama.cpp in Q8_0, 24 tokens each), so three of four prompts have one with a probability of 4e-6."""


def ask_prompt(context: Context, prompt: Sequence[int] | None = None) -> str | list[int]:
    """A prompt in the form that the server takes: token ids, or their text."""
    return context.prompt_of(context.prompts[0] if prompt is None else prompt)


def greedy(context: Context, prompt: Sequence[int], max_tokens: int, **params: Any) -> Answer:
    """The greedy answer, with log-probabilities if the server reports them."""
    return context.server.complete(
        ask_prompt(context, prompt), **greedy_params(context, max_tokens), **params
    )[0]


def greedy_params(context: Context, max_tokens: int) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens}
    if context.offers.completion_logprobs:
        params["logprobs"] = min(NUM_TOP, context.offers.num_top_logprobs)
    return params


def num_outliers(tolerance: Tolerance, num: int) -> float:
    """The number of tokens, of `num` in a text, that may exceed the tolerance."""
    return max(2.0, 4 * tolerance.outliers * num) if tolerance.outliers else 0.0


@dataclass(frozen=True)
class Difference:
    """The position at which two answers diverge. `is_tie`: both answers report the same log-probabilities
    there, within the tolerance, and each has the best token of its own list."""

    position: int
    what: str
    expected: Any
    actual: Any
    is_tie: bool = False


def difference(
    expected: Answer, actual: Answer, tolerance: Tolerance, eos_token_ids: Set[int] = frozenset()
) -> Difference | None:
    """The first difference of two answers of one server. Both have the server's format and weights, so they
    differ by the order of sums only: `allowed_of_two`."""
    first: Sequence[int | str] = expected.token_ids or expected.tokens
    second: Sequence[int | str] = actual.token_ids or actual.tokens
    if not first or not second or expected.logprobs is None or actual.logprobs is None:
        if expected.text == actual.text:
            return None
        return Difference(0, "the texts differ", expected.text, actual.text)
    num_left = num_outliers(tolerance, len(first))
    for i, (a, b) in enumerate(zip(first, second)):
        if a != b:
            is_tie = _same_scores(expected, actual, i, tolerance) and all(
                is_own_best(answer, i) for answer in (expected, actual)
            )
            return Difference(i, "the tokens differ", _at(expected, i), _at(actual, i), is_tie)
        if not abs(expected.logprobs[i] - actual.logprobs[i]) <= tolerance.allowed_of_two(
            expected.logprobs[i]
        ):
            num_left -= 1
            if num_left < 0:
                return Difference(i, "the log-probabilities differ", _at(expected, i), _at(actual, i))
    if len(first) != len(second):
        at = min(len(first), len(second))
        longer = max(expected, actual, key=lambda answer: len(answer.logprobs or ()))
        is_tie = "stop" in _reasons(expected, actual) and _may_end(longer, at, tolerance, eos_token_ids)
        return Difference(at, "the lengths differ", len(first), len(second), is_tie)
    if expected.text != actual.text:
        return Difference(len(first), "the texts of the same tokens differ", expected.text, actual.text)
    if expected.finish_reason != actual.finish_reason:
        return Difference(len(first), "finish_reason", expected.finish_reason, actual.finish_reason)
    return None


def _reasons(*answers: Answer) -> tuple[str | None, ...]:
    return tuple(answer.finish_reason for answer in answers)


def _at(answer: Answer, i: int) -> dict[str, Any]:
    found: dict[str, Any] = {"token": answer.tokens[i] if i < len(answer.tokens) else None}
    return found | {"logprob": answer.logprobs[i] if answer.logprobs else None}


def _top(answer: Answer, i: int) -> Top:
    """The alternatives of a token; empty if the server reports none."""
    return answer.top_logprobs[i] if answer.top_logprobs is not None else {}


def is_own_best(answer: Answer, i: int) -> bool:
    """Whether the server itself reports no likelier token than the chosen one. This needs no tolerance: the
    values and the choice come from the same logits. The slack is for the digits of a decimal number."""
    assert answer.logprobs is not None
    return answer.logprobs[i] >= max(_top(answer, i).values(), default=-math.inf) - OWN_SLACK


def _same_scores(one: Answer, other: Answer, i: int, tolerance: Tolerance) -> bool:
    """Whether two answers report the same values at a position. A token that a list lacks is at most as
    likely as the last one in it."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    tops = _top(one, i), _top(other, i)
    if not all(tops):  # each token is the best, so a tie makes both equally likely
        return abs(one.logprobs[i] - other.logprobs[i]) <= tolerance.allowed_of_two(one.logprobs[i])
    for top, rest in (tops, tops[::-1]):
        lowest = min(rest.values())
        for token, value in top.items():
            found = rest.get(token, min(value, lowest))
            if not abs(value - found) <= tolerance.allowed_of_two(value):
                return False
    return True


def _may_end(answer: Answer, i: int, tolerance: Tolerance, eos_token_ids: Set[int]) -> bool:
    """Whether an end-of-sequence token may be as likely as the token at a position. The answer that ended
    does not report its end token."""
    assert answer.logprobs is not None
    top = _top(answer, i)
    listed = [value for token, value in top.items() if token in eos_token_ids]
    most = max(listed, default=min(top.values(), default=math.inf))
    return answer.logprobs[i] - most <= 2 * tolerance.allowed_of_two(answer.logprobs[i])


def same_answer(context: Context, expected: Answer, actual: Answer, what: str) -> Finding:
    """One finding about two answers. `what`: the two conditions under which they were generated."""
    found = difference(expected, actual, context.tolerance, context.oracle.eos_token_ids)
    if found is None:
        return Finding("holds", what)
    evidence = {"position": found.position, "text": expected.text, "other text": actual.text}
    place = "" if expected.token_ids is None else f" at token {found.position}"
    status: Status = "near tie" if found.is_tie else "fails"
    return Finding(status, f"{what}: {found.what}{place}", found.expected, found.actual, evidence)


def same_answers(context: Context, pairs: Sequence[tuple[Answer, Answer, str]]) -> Iterator[Finding]:
    """One finding for each pair, and one more if too many are near ties: rounding does not cause these."""
    findings = [same_answer(context, *pair) for pair in pairs]
    yield from findings
    num_ties = [finding.status for finding in findings].count("near tie")
    if len(findings) >= LEAST_PAIRS and num_ties > MOST_TIES * len(findings):
        yield Finding("fails", "near ties of pairs of answers", f"at most {MOST_TIES:.0%}", num_ties)
