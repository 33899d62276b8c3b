"""Tests with few requests whether sampled tokens follow the exact distribution: every position of every
answer is one draw from its own distribution, given the tokens before it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diptych.shared.tools.conformance.server.logprob_tolerance import Tolerance

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NUM_BINS = 10
FAMILY_ALPHA = 1e-5
MOST_TESTED = 20
ALPHA = FAMILY_ALPHA / MOST_TESTED
"""A run raises a false alarm with a probability of FAMILY_ALPHA at most: it has fewer than MOST_TESTED
distributions, the p-value of each is below ALPHA with a probability of ALPHA at most, and probabilities of
alarms add up at most. With 400 draws, a server is found if a fifth of them are in other bins."""
MIN_DRAWS = 100  # ten in each bin
TAIL = 8
"""By how much the tail of such counts may exceed that of the chi-square distribution. Computed exactly where
that is 2e-8: 5.9 times with 100 draws in ten bins, 1.9 times with 400."""
SPAN = 6.0
ROUNDED_SHARE = 0.03
"""Of the draws that may be outside the filters by more than the typical error, in formats whose errors have
outliers: tokens at the border of a filter have little of the probability, and few borders are close."""


@dataclass(frozen=True)
class Asked:
    """The sampling parameters of a request, with the names of the API. `counted`: the tokens that penalties
    count. Empty: the generated ones, as in OpenAI's formula, and for repetition_penalty also the prompt's, as
    in Hugging Face transformers."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    counted: Literal["", "prompt and output", "output"] = ""

    @property
    def changes_logits(self) -> bool:
        is_penalized = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(is_penalized or self.logit_bias)

    def body(self) -> dict[str, Any]:
        """The fields that differ from the default; always temperature and top_p, as servers have other
        defaults."""
        found: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        for name in ("top_k", "min_p", "presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        if self.repetition_penalty != 1.0:
            found["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            found["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return found


@dataclass(frozen=True)
class Choice:
    """The possible tokens of one position if log-probabilities may be off by the tolerance. `share`:
    probability before any filter. `sure`: kept by every filter for all errors within the tolerance.
    `possible`: kept for some of them."""

    share: Floats
    sure: Bools
    possible: Bools
    changed: Bools  # tokens that a penalty or a bias changes


def changed_logits(
    logits: Floats, asked: Asked, prompt: Sequence[int], output: Sequence[int]
) -> tuple[Floats, Bools]:
    """Logits with penalties and bias, before temperature, and which tokens these change; both [vocab]."""
    size = len(logits)
    repeated = _counts(output if asked.counted == "output" else [*prompt, *output], size) > 0
    scores = np.where(logits > 0, logits / asked.repetition_penalty, logits * asked.repetition_penalty)
    scores = np.where(repeated, scores, logits).astype(np.float64)
    counts = _counts([*prompt, *output] if asked.counted == "prompt and output" else output, size)
    scores -= asked.frequency_penalty * counts + asked.presence_penalty * (counts > 0)
    changed = (counts > 0) & bool(asked.frequency_penalty or asked.presence_penalty)
    changed |= repeated & (asked.repetition_penalty != 1.0)
    for token, bias in asked.logit_bias.items():
        scores[token] += bias
        changed[token] = True
    return scores, changed


def choice_at(
    logits: Floats, asked: Asked, prompt: Sequence[int], output: Sequence[int], tol: float
) -> Choice:
    """The choice at one position. `logits`: [vocab], of the model. `tol`: the allowed error of a server's."""
    size = len(logits)
    scores, changed = changed_logits(logits, asked, prompt, output)
    scores = scores / asked.temperature
    scores = scores - scores.max()
    share = np.exp(scores)
    share /= share.sum()
    slack = 2 * tol / asked.temperature
    sure, possible = np.ones(size, bool), np.ones(size, bool)
    is_sorted = 0 < asked.top_k < size or asked.top_p < 1.0
    order = np.argsort(-scores, kind="stable") if is_sorted else np.array([scores.argmax()])
    if 0 < asked.top_k < size:
        last, next_one = scores[order[asked.top_k - 1]], scores[order[asked.top_k]]
        sure &= scores > next_one + slack
        possible &= scores >= last - slack
    if asked.top_p < 1.0:
        before = np.empty(size)
        before[order] = np.cumsum(share[order]) - share[order]
        # A mass m of a softmax moves by at most m (e^slack - 1) when scores move by `slack`.
        mass = asked.top_p * math.expm1(slack) + 1e-6
        # Equal tokens may be in any order: a token's place is uncertain by those within the slack.
        ranked = scores[order]
        ahead = np.searchsorted(-ranked, -(scores + slack), side="left")
        behind = np.searchsorted(-ranked, -(scores - slack), side="right") - 1
        sums = np.concatenate([[0.0], np.cumsum(share[order])])
        sure &= sums[behind] < asked.top_p - mass
        possible &= sums[ahead] < asked.top_p + mass
    if asked.min_p > 0.0:
        sure &= scores > math.log(asked.min_p) + slack
        possible &= scores >= math.log(asked.min_p) - slack
    possible[order[0]] = True
    return Choice(share, sure, possible, changed)


def _counts(ids: Sequence[int], size: int) -> NDArray[np.int64]:
    return np.bincount(np.asarray(ids, dtype=np.int64), minlength=size)


def _likeliness(share: Floats) -> Floats:
    """1 for the most likely tokens, 0 for those that are SPAN nats less likely."""
    with np.errstate(divide="ignore"):
        weight: Floats = 1.0 + np.log(share / share.max()).clip(-SPAN) / SPAN
    return weight


@dataclass
class Draws:
    """The quantiles in [0, 1) of the drawn tokens within their distributions, which are uniform if the server
    samples correctly. Tokens are ordered by probability, those that a penalty or bias changes first. The
    weight of a token is 1 if a penalty or bias changes it, otherwise 0. Without penalty and bias it is larger
    for likelier tokens, so that the surplus shows a wrong temperature. `rivals`: rules, by name, that a wrong
    server is likely to follow. `log_ratios`: how much likelier the draws are under each rule."""

    rng: random.Random
    tolerance: Tolerance
    excluded: frozenset[int] = frozenset()  # end-of-sequence tokens, which servers do not report
    rivals: Mapping[str, Asked] = field(default_factory=dict)
    log_ratios: dict[str, float] = field(default_factory=dict)
    places: list[float] = field(default_factory=list)
    impossible: list[dict[str, Any]] = field(default_factory=list)
    outside: list[dict[str, Any]] = field(default_factory=list)  # drawn outside the server's own top_k
    num_left_out: int = 0
    surplus: float = 0.0  # sum of the drawn tokens' weights, beyond the expected one
    variance: float = 0.0  # of the surplus

    @property
    def tol(self) -> float:
        """The tolerance of one log-probability."""
        return self.tolerance.typical_error if self.tolerance.outliers else self.tolerance.max_error

    @property
    def too_many_impossible(self) -> bool:
        share = ROUNDED_SHARE if self.tolerance.outliers else 0.0
        return len(self.impossible) > share * (len(self.places) + len(self.impossible) + self.num_left_out)

    def add(self, logits: Floats, asked: Asked, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Add all tokens of an answer. `logits`: [len(output), vocab]; output[i] is drawn from row i."""
        for i, token in enumerate(output):
            choice = choice_at(logits[i], asked, prompt, output[:i], self.tol)
            if token >= len(choice.possible) or not choice.possible[token]:  # a padding row, or filtered out
                self.impossible.append(
                    {
                        "position": i,
                        "token": int(token),
                        "probability": float(choice.share[token]) if token < len(choice.share) else 0.0,
                        **asked.body(),
                    }
                )
                continue
            sure = choice.sure.copy()
            sure[list(self.excluded)] = False
            if not sure[token]:
                self.num_left_out += 1  # an end-of-sequence token, or one at the threshold of a filter
                continue
            share = np.where(sure, choice.share, 0.0)
            share /= share.sum()
            weight = choice.changed.astype(np.float64) if asked.changes_logits else _likeliness(share)
            mean = float(share @ weight)
            self.surplus += float(weight[token]) - mean
            self.variance += float(share @ (weight - mean) ** 2)
            for name, rival in self.rivals.items():
                other = choice_at(logits[i], rival, prompt, output[:i], self.tol)
                self._compare(name, share, np.where(sure & other.possible, other.share, 0.0), token)
            self.places.append(self._place(share, choice.changed, token))

    def _place(self, share: Floats, changed: Bools, token: int) -> float:
        is_likelier = (share > share[token]) | ((share == share[token]) & (np.arange(len(share)) < token))
        is_before = (changed == changed[token]) & is_likelier
        below = float(share[is_before | (changed & ~changed[token])].sum())
        return min(below + self.rng.random() * float(share[token]), 1.0 - 1e-12)

    def _compare(self, name: str, share: Floats, other: Floats, token: int) -> None:
        total = float(other.sum())
        if total > 0.0:  # else the rival has no token that is possible here
            with np.errstate(divide="ignore"):
                ratio = float(np.log(other[token] / total) - np.log(share[token]))
            self.log_ratios[name] = self.log_ratios.get(name, 0.0) + ratio

    def p_value(self) -> float:
        """The smallest of three tests, times three: that the places are uniform, that the surplus is small,
        that no rival explains the draws better."""
        return min(1.0, 3 * min(self.uniform_p_value(), self.surplus_p_value(), self.rival_p_value()))

    def rival_p_value(self) -> float:
        """An upper bound, by Ville's inequality: if the server follows the rule, the likelihood ratio of a
        rival has mean 1, and reaches x with a probability of at most 1 / x."""
        largest = max(self.log_ratios.values(), default=0.0)
        return min(1.0, len(self.log_ratios) * math.exp(-largest)) if largest > 0.0 else 1.0

    def surplus_p_value(self) -> float:
        """An upper bound of the probability of such a surplus, by Freedman's inequality for martingales: the
        expected number follows from tokens drawn before. Ten times that, as the variance is no constant."""
        distance = abs(self.surplus)
        if distance == 0.0:
            return 1.0
        bound = math.exp(-(distance**2) / (2 * (self.variance + distance / 3)))
        return min(1.0, 20 * bound)

    def uniform_p_value(self) -> float:
        """The p-value of the chi-square test, times TAIL, because the counts are small integers."""
        import torch

        from diptych.shared.tools.conformance.oracles.chi_square import p_value

        bins = torch.tensor([int(place * NUM_BINS) for place in self.places])
        return min(1.0, TAIL * p_value(bins, [1 / NUM_BINS] * NUM_BINS))

    def counts(self) -> list[int]:
        """The number of draws in each bin."""
        return [int(num) for num in np.histogram(self.places, NUM_BINS, (0.0, 1.0))[0]]
