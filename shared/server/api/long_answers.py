"""Answers that are long: they are made in a thread and written in pieces, so that other requests get their
turns. A short one is made on the event loop, which costs less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response

_T = TypeVar("_T")

INLINE_VALUES = 4096
"""Numbers and texts that the event loop makes or writes without a pause: a few milliseconds."""
PIECE_VALUES = 8192
"""Written in one call, in which no other thread runs."""
CHARS_OF_A_VALUE = 256
"""A text counts as one value more for each."""

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="answers")
"""One: threads that run Python take the event loop's time in turn."""


async def in_turn(num_values: int, function: Callable[..., _T], *args: Any) -> _T:
    """What the function returns; in a thread if it makes more than INLINE_VALUES."""
    if num_values <= INLINE_VALUES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_THREAD, function, *args)


async def json_answer(num_values: int, make: Callable[[], Any]) -> Response:
    """An answer with the JSON of what `make` returns."""
    content = await in_turn(num_values, lambda: written(make()))
    return Response(content, media_type="application/json")


def written(value: Any, encode: Callable[[Any], bytes] = msgspec.json.encode) -> bytes:
    """JSON, as `encode` writes it."""
    return b"".join(_pieces(value, encode))


def num_values(value: Any, most: int = INLINE_VALUES) -> int:
    """Numbers and texts in a JSON value; if there are more than `most`, any larger number. A list has either
    values or containers, of which its last entry is one."""
    if isinstance(value, str):
        return 1 + len(value) // CHARS_OF_A_VALUE
    if not isinstance(value, (list, tuple, dict)):
        return 1
    if not isinstance(value, dict) and not (value and isinstance(value[-1], (list, tuple, dict, str))):
        return len(value)
    total = 0
    for each in value.values() if isinstance(value, dict) else value:
        total += num_values(each, most - total)
        if total > most:
            break
    return total


def _pieces(value: Any, encode: Callable[[Any], bytes]) -> Iterator[bytes]:
    if num_values(value, PIECE_VALUES) <= PIECE_VALUES or not isinstance(value, (list, tuple, dict)):
        yield encode(value)
    elif isinstance(value, dict):
        for i, (name, each) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if i else b"{", encode(name))
            yield from _pieces(each, encode)
        yield b"}"
    else:
        for i, entries in enumerate(_slices(value)):
            yield b"," if i else b"["
            if len(entries) == 1:
                yield from _pieces(entries[0], encode)
            else:
                yield encode(entries)[1:-1]
        yield b"]"


def _slices(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Parts of a list, of at most PIECE_VALUES values, or of one entry that has more."""
    start, total = 0, 0
    for end, entry in enumerate(entries):
        size = num_values(entry, PIECE_VALUES)
        if total and total + size > PIECE_VALUES:
            yield entries[start:end]
            start, total = end, 0
        total += size
    yield entries[start:]
