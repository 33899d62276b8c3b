"""Limits of stop strings and stop regexes, which hold before a pattern is compiled.

A stop regex comes from a client, and the package `regex` writes nested repetitions out: `(a{1000}){1000}`
takes half a second and 250 MB to compile. The check needs no parser, because its estimate is never too low.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import regex

MAX_STOPS = 16
"""Stop strings of one request, and stop regexes."""
MAX_STOP_CHARS = 512
"""Of one stop string or stop regex."""
MAX_REGEX_SIZE = 50_000
"""Of all stop regexes of a request together, as `regex_size` counts. The slowest known patterns of this size
compile in 0.05 to 0.12 s: `regex.compile('(?i:[a-zé]{1000}){47}b')`, measured by `python -m timeit -n 1`."""
REGEX_CHECK_SECONDS = 0.1
"""Time limit of trying all stop regexes of a request on the empty text."""

_REPETITION = re.compile(r"(.?)\{(\d*)(?:,(\d*))?\}", re.DOTALL)
_VERBOSE_FLAG = re.compile(r"\(\?\w*x")


def check_stop_strings(stops: Sequence[object]) -> None:
    """Raise `ValueError` for anything but a few short strings."""
    if any(not isinstance(text, str) or not text for text in stops):
        raise ValueError(f"stop must hold non-empty strings, got {stops!r:.80}")
    _check_lengths("stop", stops)


def check_stop_regexes(patterns: Sequence[object]) -> None:
    """Raise `ValueError` for anything but a few short patterns that are small when compiled and match no
    empty text."""
    if any(not isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"stop_regex must hold patterns (strings), got {patterns!r:.80}")
    _check_lengths("stop_regex", patterns)
    size = sum(regex_size(str(pattern)) for pattern in patterns)
    if size > MAX_REGEX_SIZE:
        raise ValueError(
            f"stop_regex repeats too often: length times nested repetitions is {size}, at most "
            f"{MAX_REGEX_SIZE} are allowed"
        )
    end = time.monotonic() + REGEX_CHECK_SECONDS
    for pattern in map(str, patterns):
        try:
            compiled = regex.compile(pattern)
            found = compiled.search("", timeout=max(end - time.monotonic(), 0.001))
        except TimeoutError:  # no verdict: other processes check again, and it must be theirs too
            continue
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex {pattern!r} is not a valid pattern: {error}") from None
        if found is not None:
            raise ValueError(
                f"stop_regex {pattern!r} matches the empty text: the output would always be empty"
            )


def regex_size(pattern: str) -> int:
    """An upper bound of a pattern's size when all repetitions are written out. Raises `ValueError` for a
    pattern that could hide a repetition from the count.

    Only what ends with `)` or `}` can hold repetitions inside, so bounds behind these are multiplied, and
    all other bounds added. Verbose mode ignores spaces, so they are left out; its comments are refused.
    """
    if "\n" in pattern.partition("#")[2] and _VERBOSE_FLAG.search(pattern):
        raise ValueError(f"stop_regex {pattern!r}: comments of verbose mode are not supported")
    added, factor = len(pattern), 1
    for before, least, most in _REPETITION.findall("".join(pattern.split())):
        bound = max(int(least or 0), int(most or 0), 1)
        if before in (")", "}"):
            factor *= bound
        else:
            added += bound
    return added * factor


def _check_lengths(name: str, texts: Sequence[object]) -> None:
    if len(texts) > MAX_STOPS:
        raise ValueError(f"{name} takes at most {MAX_STOPS} texts, got {len(texts)}")
    longest = max((len(str(text)) for text in texts), default=0)
    if longest > MAX_STOP_CHARS:
        raise ValueError(f"{name} takes texts of at most {MAX_STOP_CHARS} characters, got {longest}")
