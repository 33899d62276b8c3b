"""Checks of sampling parameters that name tokens or words. Each raises `ValueError`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_FLOAT = 3.4e38
"""Sampling computes in float32, where a larger number is infinite."""
MAX_ASKED = 256
"""Tokens of token_ids_logprob, and bad_words: each costs something at every token of the answer."""
MAX_WORD_CHARS = 512


def is_number(value: Any, kind: type | tuple[type, ...]) -> bool:
    """True and False are integers to Python, but no numbers here."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_token_ids(name: str, ids: Iterable[Any]) -> None:
    if any(not is_number(token_id, int) or token_id < 0 for token_id in ids):
        raise ValueError(f"{name} must hold token ids, got {ids!r:.80}")


def check_asked(token_ids_logprob: Sequence[int], allowed_token_ids: Sequence[int] | None) -> None:
    """Their numbers."""
    _check_number("token_ids_logprob", token_ids_logprob)
    if allowed_token_ids is not None and not allowed_token_ids:
        raise ValueError("allowed_token_ids must hold at least one token id")


def checked_bad_words(words: Sequence[Any], word_ids: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """`word_ids` as tuples."""
    _check_number("bad_words", words)
    if any(not isinstance(word, str) or not word.strip() or len(word) > MAX_WORD_CHARS for word in words):
        raise ValueError(f"bad_words must hold words of at most {MAX_WORD_CHARS} characters")
    found = tuple(map(tuple, word_ids))
    for ids in found:
        check_token_ids("bad_word_ids", ids)
    if () in found:
        raise ValueError("bad_word_ids must hold lists of token ids, got an empty one")
    return found


def check_biases(biases: Any) -> None:
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {biases!r}")
    for token_id, bias in biases.items():
        if not is_number(token_id, int) or token_id < 0:
            raise ValueError(f"logit_bias keys must be token ids, got {token_id!r}")
        if not isinstance(bias, (int, float)) or not (abs(bias) <= MAX_FLOAT or bias == -math.inf):
            raise ValueError(
                f"logit_bias[{token_id}] must be a finite number or -inf (never produce), got {bias!r}"
            )


def _check_number(name: str, values: Sequence[Any]) -> None:
    if len(values) > MAX_ASKED:
        raise ValueError(f"{name} takes at most {MAX_ASKED} entries, got {len(values)}")
