"""The rules of stop texts, for the scheduler, which ends requests, and the detokenizer, which trims texts.

A stop regex comes from a client, and a pattern such as `(a+)+b` takes time exponential in the text's length:
each search has a time limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import regex

NUM_CONTEXT_TOKENS = 5
"""Prompt tokens decoded in front of the output: some tokenizers drop the space of a text's first word."""

REPLACEMENT = "\ufffd"
"""What bytes that form no (whole) character are decoded to."""

MAX_CHARACTER_BYTES = 4
"""Bytes of the longest UTF-8 character."""

REGEX_SECONDS = 0.05
"""Time limit of the searches of a request after a token. They run between two steps: all requests wait."""


class RegexTimeout(Exception):
    """Stop regexes exceeded REGEX_SECONDS. `pattern`: the one that was searched then."""

    def __init__(self, pattern: str) -> None:
        super().__init__(f"stop_regex {pattern!r}: the search of the output took more than {REGEX_SECONDS} s")
        self.pattern = pattern


def first_stop_string(text: str, stops: Sequence[str]) -> str | None:
    """Find the stop string that begins first in `text`."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found, key=lambda match: match[0])[1] if found else None


def search_stop_regex(pattern: str, text: str, seconds: float = REGEX_SECONDS) -> tuple[int, str] | None:
    """Where the first match begins, and its text. Raises `RegexTimeout`."""
    try:
        match = regex.search(pattern, text, timeout=seconds)
    except TimeoutError:
        raise RegexTimeout(pattern) from None
    return (match.start(), match.group()) if match else None


def num_held_chars(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string may begin."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
