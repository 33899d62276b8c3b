"""Compares two greedy answers of a server, which may differ only at near ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.conformance.server.answer import Answer, Top
from shared.conformance.server.checks import Context, Finding, Status
from shared.conformance.server.tolerance import Tolerance

NUM_TOP = 5


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
    """The position at which two answers diverge. `is_tie`: both tokens are equally likely within the
    tolerance."""

    position: int
    what: str
    expected: Any
    actual: Any
    is_tie: bool = False


def difference(expected: Answer, actual: Answer, tolerance: Tolerance) -> Difference | None:
    """The first difference. Each of the two answers may be off by the tolerance."""
    first: Sequence[int | str] = expected.token_ids or expected.tokens
    second: Sequence[int | str] = actual.token_ids or actual.tokens
    if not first or not second or expected.logprobs is None or actual.logprobs is None:
        if expected.text == actual.text:
            return None
        return Difference(0, "the texts differ", expected.text, actual.text)
    num_left = num_outliers(tolerance, len(first))
    for i, (a, b) in enumerate(zip(first, second)):
        limit = 2 * tolerance.allowed(expected.logprobs[i])
        if a != b:
            is_tie = num_left > 0 or (_is_tie(expected, b, i, limit) and _is_tie(actual, a, i, limit))
            return Difference(i, "the tokens differ", _at(expected, i), _at(actual, i), is_tie)
        if not abs(expected.logprobs[i] - actual.logprobs[i]) <= limit:
            num_left -= 1
            if num_left < 0:
                return Difference(i, "the log-probabilities differ", _at(expected, i), _at(actual, i))
    if len(first) != len(second):
        # One answer ended with an end-of-sequence token, which is not reported, so a tie cannot be detected.
        at = min(len(first), len(second))
        return Difference(
            at, "the lengths differ", len(first), len(second), "stop" in _reasons(expected, actual)
        )
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


def _is_tie(answer: Answer, other: int | str, i: int, limit: float) -> bool:
    """Whether the other answer's token is within the limit of this one's, if this answer lists it."""
    if answer.top_logprobs is None or answer.logprobs is None:
        return True
    top: Top = answer.top_logprobs[i]
    lowest = min(top.values(), default=-math.inf)
    return answer.logprobs[i] - top.get(other, lowest) <= limit


def same_answer(context: Context, expected: Answer, actual: Answer, what: str) -> Finding:
    """One finding about two answers. `what`: the two conditions under which they were generated."""
    found = difference(expected, actual, context.tolerance)
    if found is None:
        return Finding("holds", what)
    evidence = {"position": found.position, "text": expected.text, "other text": actual.text}
    status: Status = "near tie" if found.is_tie else "fails"
    return Finding(
        status, f"{what}: {found.what} at token {found.position}", found.expected, found.actual, evidence
    )
