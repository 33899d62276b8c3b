"""Diagnoses wrong log-probabilities: the pattern of the errors often indicates the kind of fault."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.shared.tools.conformance.server.logprob_tolerance import Tolerance
from diptych.shared.tools.conformance.server.scored import Scored, rounded

TEMPERATURES = (
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1.1,
    1.2,
    1.25,
    1.3,
    1.4,
    1.5,
    1.75,
    2.0,
    2.5,
    3.0,
)
SHIFTS = (1, -1, 2, -2)
LEAST = 5  # positions that a pattern must explain


def diagnose(text: Scored, rows: np.ndarray, tolerance: Tolerance) -> str:
    """One sentence about all values, or an empty one if no pattern fits. `rows`: the reference's
    log-probabilities of `text.ids`, [len, vocab_size]."""
    if len(text.positions) < LEAST:
        return ""
    patterns = (
        _shift(text, rows, tolerance),
        _temperature(text, rows, tolerance),
        _unit(text, tolerance),
        _constant(text, tolerance),
        rounded((text,)),
    )
    return next(filter(None, patterns), "")


def is_other_model(texts: Sequence[Scored]) -> bool:
    """Whether most tokens have large errors without a pattern, as with another model."""
    return bool(np.median(np.concatenate([text.errors for text in texts])) > 0.5)


def _explains(
    text: Scored, values: np.ndarray, tolerance: Tolerance, where: np.ndarray | None = None
) -> bool:
    """Whether the server's values equal these and not the reference's: within the format's tolerance, or
    nearly, with a twentieth of the errors."""
    where = np.ones(len(values), dtype=bool) if where is None else where
    if where.sum() < LEAST:
        return False
    error = np.nan_to_num(np.abs(text.actual - values)[where], nan=1e9, posinf=1e9)
    own = np.minimum(text.errors[where], 1e9)
    medians, means = (np.median(error), np.median(own)), (error.mean(), own.mean())
    is_near = medians[0] < medians[1] / 20 and means[0] < means[1] / 8
    is_exact = medians[0] < 3 * tolerance.typical_error and means[0] < 3 * tolerance.mean_error
    return bool(is_near or (is_exact and medians[0] < medians[1] / 4 and means[0] < means[1] / 3))


def _shift(text: Scored, rows: np.ndarray, tolerance: Tolerance) -> str:
    positions, ids = np.array(text.positions), np.array(text.ids)
    for shift in SHIFTS:
        other = positions + shift
        inside = (other >= 1) & (other < len(ids))
        clipped = other.clip(1, len(ids) - 1)
        of_row = rows[clipped - 1, list(text.token_ids)]
        of_token = rows[clipped - 1, ids[clipped]]
        where = f"{abs(shift)} position{'s' * (abs(shift) > 1)} {'later' if shift > 0 else 'earlier'}"
        if _explains(text, of_token, tolerance, inside):
            return f"wrong position: each value is that of the token {where}"
        if _explains(text, of_row, tolerance, inside):
            return f"wrong position: each value is from the logits {where}"
    return ""


def _temperature(text: Scored, rows: np.ndarray, tolerance: Tolerance) -> str:
    chosen = rows[np.array(text.positions) - 1]
    for temperature in TEMPERATURES:
        scaled = chosen / temperature
        total = np.log(np.exp(scaled).sum(axis=-1))
        values = scaled[np.arange(len(total)), list(text.token_ids)] - total
        if _explains(text, values, tolerance):
            return f"softmax temperature: the values are those of temperature {temperature:g}"
    return ""


def _unit(text: Scored, tolerance: Tolerance) -> str:
    if _explains(text, text.expected / np.log(10), tolerance):
        return "the logarithms have base 10"
    if _explains(text, np.exp(text.expected), tolerance):
        return "the values are probabilities, not their logarithms"
    return ""


def _constant(text: Scored, tolerance: Tolerance) -> str:
    """A normaliser over too many or too few tokens shifts every value alike."""
    if not np.isfinite(text.actual).all():
        return ""
    offset = float(np.median(text.actual - text.expected))
    if _explains(text, text.expected + offset, tolerance):
        return f"every value is off by {offset:+.3g}: the softmax sums over other tokens than the vocabulary"
    return ""


def wrong_region(text: Scored, tolerance: Tolerance) -> str:
    """Whether values are right up to a position and wrong behind it: K and V of earlier tokens are wrong from
    there."""
    positions = np.unique(text.positions)
    beyond = np.unique(np.array(text.positions)[text.beyond(tolerance)])
    if not len(beyond):
        return ""
    first, last = int(beyond.min()), int(beyond.max())
    share = len(beyond) / max(int((positions >= first).sum()), 1)
    if int((positions < first).sum()) >= LEAST and share > 0.25:
        return (
            f"stale page or chunk border: right before position {first} and wrong from there, as if K and V "
            "of earlier tokens were those of another text"
        )
    if int((positions > last).sum()) >= LEAST and last > first:
        return f"only positions {first} to {last} are wrong: those of one page or chunk"
    return ""
