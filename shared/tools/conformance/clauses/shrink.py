"""Shrinks a failing case to a smaller one that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from diptych.shared.tools.conformance.clauses.case import fields_of, with_field

MAX_TRIES = 300


def shrink(case: Any, still_fails: Callable[[Any], bool], max_tries: int = MAX_TRIES) -> Any:
    """A smallest failing case, found greedily: the first smaller candidate that still fails replaces the
    case, until none fails. Invalid candidates (making one raises `ValueError` or `AssertionError`) are
    skipped."""
    tries = 0
    found = True
    while found:
        found = False
        for candidate in smaller_cases(case):
            tries += 1
            if tries > max_tries:
                return case
            if still_fails(candidate):
                case, found = candidate, True
                break
    return case


def smaller_cases(case: Any) -> Iterator[Any]:
    """Cases with one field made smaller: big steps first. Fields named `seed` or `name` stay."""
    for name, value in (fields_of(case) or {}).items():
        if name in ("seed", "name"):
            continue
        for smaller in _smaller_values(value):
            try:
                yield with_field(case, name, smaller)
            except (ValueError, AssertionError):
                continue


def _smaller_values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        if value:
            yield False
    elif isinstance(value, int):
        yield from (v for v in dict.fromkeys((0, 1, value // 2, value - 1)) if 0 <= v < value)
    elif isinstance(value, float):
        yield from (v for v in (0.0, 1.0) if v != value)
    elif isinstance(value, tuple):
        yield from _shorter(value)
        for i, element in enumerate(value):
            for smaller in _smaller_values(element):
                yield (*value[:i], smaller, *value[i + 1 :])
    else:
        yield from smaller_cases(value)


def _shorter(value: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the value without its second half, its first half, ... down to without single elements."""
    size = len(value)
    step = max(size // 2, 1)
    while size and step:
        for start in range(0, size, step):
            yield value[:start] + value[start + step :]
        step //= 2
