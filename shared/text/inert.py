"""Markers that are spelled in a message stay plain text.

A tokenizer makes a special token of its spelling, wherever it stands. In what a client sends, each spelling
is cut in two by a breaker, and the text that the chat template writes is tokenized in the pieces between
breakers. No piece holds a whole marker that a client wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

BREAKER = "\ufdd0\ufdef\ufdd0"
"""Three characters that Unicode reserves: no text may hold them."""


class Inert:
    """Puts breakers into values that clients send."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._pattern = re.compile(_one_of({m for m in markers if len(m) > 1 and not m.isspace()}) or r"(?!)")

    def __call__(self, value: Any) -> Any:
        """The same value; its texts, at any depth, have a breaker behind the first character of a marker.
        Raises `ValueError` for a value that is nested too deeply."""
        try:
            return self._broken(value)
        except RecursionError:
            raise ValueError("the messages or tools are nested too deeply") from None

    def _broken(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0] + BREAKER, value.replace(BREAKER, ""))
        if isinstance(value, dict):
            return {self._broken(key): self._broken(child) for key, child in value.items()}
        return [self._broken(child) for child in value] if isinstance(value, (list, tuple)) else value


def _one_of(words: set[str]) -> str:
    """A pattern of the first character of each place where a word begins. Its size and speed do not depend
    on how many words share their beginnings."""
    by_first: dict[str, set[str]] = {}
    for word in words:
        by_first.setdefault(word[0], set()).add(word[1:])
    return "|".join(f"{re.escape(first)}(?={_rest(rests)})" for first, rests in sorted(by_first.items()))


def _rest(rests: set[str]) -> str:
    if "" in rests:
        return ""
    by_first: dict[str, set[str]] = {}
    for rest in rests:
        by_first.setdefault(rest[0], set()).add(rest[1:])
    parts = [f"{re.escape(first)}{_rest(more)}" for first, more in sorted(by_first.items())]
    return f"(?:{'|'.join(parts)})" if len(parts) > 1 else parts[0]
