"""The rules of stop texts, for the scheduler, which ends requests, and the detokenizer, which trims texts.

A stop regex comes from a client, and a pattern such as `(a+)+b` takes time exponential in the text's length:
each search has a time limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import regex

DecodeText = Callable[[list[int]], str]

NUM_CONTEXT_TOKENS = 5
"""Prompt tokens decoded in front of the output: some tokenizers drop the space of a text's first word."""

REPLACEMENT = "\ufffd"
"""What bytes that form no (whole) character are decoded to."""

MAX_CHARACTER_BYTES = 4
"""Bytes of the longest UTF-8 character."""

_MAX_PENDING_TOKENS = 16
"""More tokens than any incomplete character can have: then the bytes are no characters."""

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


_SEARCHES_ANEW = re.compile(r"\\[bBmMGKX]|\{[^}]*[a-z]")
"""In patterns that are searched in the whole text each time: their matches depend on where a search starts,
or are not exact, or `regex` says of the end of a text neither that it matches nor that it may."""


class OutputScan:
    """The text of a growing output, as stop regexes search it. A token is decoded with the few before it, and
    no text is searched again in which no match can begin: the cost of an output grows with its length, unless
    a pattern such as `a.*b` may still match from far back."""

    def __init__(self, context: Sequence[int], decode_text: DecodeText) -> None:
        """context: the last prompt tokens."""
        self.num_ids = 0
        self._decode_text = decode_text
        self._context, self._pending = list(context), list[int]()
        self._context_text = decode_text(self._context)
        self._certain = ""  # text that later tokens do not change
        self._text = ""
        self._starts: dict[str, int] = {}  # of each pattern: no match begins before

    def append(self, token_id: int) -> None:
        """The next token of the output."""
        self.num_ids += 1
        self._pending.append(token_id)
        text = self._decode_text(self._context + self._pending)[len(self._context_text) :]
        self._text = self._certain + text
        if (text and not text.endswith(REPLACEMENT)) or len(self._pending) > _MAX_PENDING_TOKENS:
            self._certain, self._context, self._pending = self._text, self._pending, []
            self._context_text = self._decode_text(self._context)

    def search(self, patterns: Sequence[str], seconds: float) -> tuple[str, str] | None:
        """The pattern whose match begins first, and the matched text. Raises `RegexTimeout` when all searches
        together take longer than `seconds`."""
        end, found = time.monotonic() + seconds, list[tuple[int, str, str]]()
        for pattern in patterns:
            compiled = regex.compile(pattern)
            left = max(end - time.monotonic(), 0.001)
            try:
                match = compiled.search(self._text, self._starts.get(pattern, 0), partial=True, timeout=left)
            except TimeoutError:
                raise RegexTimeout(pattern) from None
            if match is not None and not match.partial:
                found.append((match.start(), pattern, match.group()))
            elif not (self._pending or compiled.flags & regex.REVERSE or _SEARCHES_ANEW.search(pattern)):
                self._starts[pattern] = match.start() if match is not None else len(self._text)
        return min(found)[1:] if found else None


def num_held_chars(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string may begin."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
