"""Compares log-probabilities of a server with the reference's, and judges the errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diptych.shared.tools.conformance.server.logprob_tolerance import Tolerance

MOST_OF_ONE_TEXT = 2
"""Outliers that one text may have in a format that has any."""
DIGITS = (0, 1, 2, 3)
LEAST_ROUNDED = 8
"""Values that show a rounding to 3 digits: by chance, 8 of them have a probability of (4e-6 / 1e-3) ** 8."""


@dataclass(frozen=True)
class Scored:
    """One text: at each of n positions a token id and its log-probability by server and reference. A position
    is the index of the predicted token in `ids`; it may occur more than once, with alternatives."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    actual: np.ndarray  # float64 [n]
    expected: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """float64 [n]; inf for a NaN or an infinity on one side only."""
        errors: np.ndarray = np.nan_to_num(np.abs(self.actual - self.expected), nan=np.inf)
        return errors

    def beyond(self, tolerance: Tolerance) -> np.ndarray:
        """bool [n]"""
        allowed = np.array([tolerance.allowed(value) for value in self.expected])
        exceeds: np.ndarray = self.errors > allowed
        return exceeds


def score(rows: np.ndarray, ids: Sequence[int], entries: Sequence[tuple[int, int, float]]) -> Scored:
    """`rows`: the reference's log-probabilities [len(ids), vocab_size]; `entries`: position, token id and the
    server's value. Ids outside the vocabulary are left out: padding rows have no reference."""
    known = [entry for entry in entries if 0 <= entry[1] < rows.shape[1]]
    positions = tuple(position for position, _, _ in known)
    token_ids = tuple(token_id for _, token_id, _ in known)
    expected = np.array([rows[position - 1, token_id] for position, token_id, _ in known])
    return Scored(tuple(ids), positions, token_ids, np.array([value for *_, value in known]), expected)


@dataclass(frozen=True)
class Verdict:
    """The verdict on several texts. `reasons`: why the errors exceed the tolerance; empty: they do not.
    `worst`: the text with the worst errors."""

    reasons: tuple[str, ...]
    worst: Scored | None
    num: int
    evidence: dict[str, Any]


def judge(texts: Sequence[Scored], tolerance: Tolerance) -> Verdict:
    """Judge each text by its number of outliers, and all texts together by mean, median and share of
    outliers."""
    texts = [text for text in texts if len(text.positions)]
    if not texts:
        return Verdict(("the answers have no log-probability to compare",), None, 0, {})
    errors = np.concatenate([text.errors for text in texts])
    counts = [int(text.beyond(tolerance).sum()) for text in texts]
    reasons = [found] if (found := rounded(texts)) else []
    if sum(counts) > tolerance.outliers * len(errors) and (tolerance.outliers == 0 or sum(counts) > 2):
        reasons.append(f"{sum(counts)} of {len(errors)} are beyond tolerance")
    for text, count in zip(texts, counts):
        share = 4 * tolerance.outliers * len(text.positions)
        if tolerance.outliers and count > max(MOST_OF_ONE_TEXT, share) and not reasons:
            reasons.append(f"{count} of {len(text.positions)} of one text are beyond tolerance")
    # As in tolerance.allowed: unlikely tokens, which are frequent in lists of alternatives, have larger
    # errors.
    scales = np.concatenate([1.0 + np.abs(text.expected) / 3.0 for text in texts])
    mean, median = float(errors.mean()), float(np.median(errors / scales))
    if mean > tolerance.mean_error:
        reasons.append(f"the mean error is {mean:.2g}, allowed {tolerance.mean_error:g}")
    if len(errors) >= 16 and median > tolerance.typical_error:
        reasons.append(
            f"the median error of a likely token is {median:.2g}, allowed {tolerance.typical_error:g}"
        )
    worst = max(zip(counts, (float(text.errors.mean()) for text in texts), texts), key=lambda each: each[:2])[
        2
    ]
    return Verdict(tuple(reasons), worst, len(errors), _evidence(texts, worst, tolerance, errors))


def rounded(texts: Sequence[Scored]) -> str:
    """A sentence if all values have few digits behind the point, or an empty one. It is an error in every
    format: sums of such values differ from a text's log-probability, and equal values hide which token is
    the best. Values near 0 are left out, as they are near a rounded number by themselves."""
    actual = np.concatenate([text.actual for text in texts])
    actual = actual[np.abs(actual) > 10.0 ** -DIGITS[-1]]
    if len(actual) < LEAST_ROUNDED or not np.isfinite(actual).all():
        return ""
    for digits in DIGITS:
        if np.allclose(actual, actual.round(digits), rtol=0, atol=2e-6):  # float32 of a rounded number
            digit = "digit" if digits == 1 else "digits"
            return f"the values are rounded to {digits} {digit} behind the point"
    return ""


def _evidence(
    texts: Sequence[Scored], worst: Scored, tolerance: Tolerance, errors: np.ndarray
) -> dict[str, Any]:
    by_position: dict[int, list[float]] = {}
    for text in texts:
        for position, error in zip(text.positions, text.errors):
            by_position.setdefault(position, []).append(_finite(error))
    largest = int(worst.errors.argmax())
    return {
        "texts": len(texts),
        "mean error": _finite(errors.mean()),
        "median error": _finite(np.median(errors)),
        "largest error": _finite(errors.max()),
        "first position beyond tolerance": first_beyond(worst, tolerance),
        "worst token": {
            "position": worst.positions[largest],
            "token id": worst.token_ids[largest],
            "expected": _finite(worst.expected[largest]),
            "actual": _finite(worst.actual[largest]),
        },
        "by position": [[p, sum(of) / len(of), max(of)] for p, of in sorted(by_position.items())],
        "histogram": _decades(errors),
    }


def first_beyond(text: Scored, tolerance: Tolerance) -> int | None:
    beyond = text.beyond(tolerance)
    return min(np.array(text.positions)[beyond].tolist(), default=None) if beyond.any() else None


DECADES = range(-8, 2)


def _decades(errors: np.ndarray) -> list[list[float]]:
    """[upper edge, number of errors below it and not below the edge before]; the last has no upper edge."""
    exponents = np.floor(np.log10(np.maximum(errors, 1e-12))).clip(DECADES.start, DECADES.stop - 1)
    return [[10.0 ** (decade + 1), int((exponents == decade).sum())] for decade in DECADES]


def _finite(value: Any) -> float:
    """A number for JSON, which has no infinity."""
    return float(np.nan_to_num(float(value), nan=1e9, posinf=1e9, neginf=-1e9))
