"""Bytes and JSON values that are nearly right."""

from __future__ import annotations

import random
from typing import Any

ODD_BYTES = (
    b"", b"\0", b"\xff" * 4, b"\xc1", b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 5000, b"\xdb\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7,
    b"\xcb\x7f\xf0" + b"\0" * 6,
    b"[" * 5000, b'{"a":' * 500, b"\xed\xa0\x80", b'"\\ud800"', b"1e999", b"NaN", b"-0", b"9" * 400,
    b"\r\n", b"\r\n\r\n",
)  # fmt: skip
"""Headers of huge MessagePack values, deep lists, broken texts, odd numbers."""
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 0.5, -0.5, 1e308,
    float("nan"),
    float("inf"), "", "a", "\0", "\ud800", "\U0010ffff", "a" * 5000, "(a+)+$", "{{ 7 * 7 }}",
    "../../etc/passwd", [], {},
    [[]], [None], [""], [-1], [2**40], [[1, 2]], {"": None}, {"a": {"b": []}}, {"type": "object"},
    {"$ref": "#"},
    [{"role": "user", "content": "a"}], [{"type": "text", "text": "a"}],
)  # fmt: skip


def nearly(data: bytes, rng: random.Random, others: tuple[bytes, ...] = ODD_BYTES) -> bytes:
    """The data with some bytes changed, left out, repeated, or with others between them."""
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([0, 1, 1, 2, 4, 16, 1000]))
        kind = rng.randrange(6)
        middle = data[start:end]
        if kind == 0:
            middle = bytes(each ^ 1 << rng.randrange(8) for each in middle)
        elif kind == 1:
            middle = b""
        elif kind == 2:
            middle = middle * rng.choice([2, 2, 100])
        elif kind == 3:
            middle = rng.randbytes(len(middle))
        else:
            middle = rng.choice(others) + middle * (kind == 4)
        data = data[:start] + middle + data[end:]
    return data


def value(rng: random.Random, depth: int = 3) -> Any:
    """An odd value, or one that has some."""
    kind = rng.random()
    if depth and kind < 0.1:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if depth and kind < 0.2:
        return {rng.choice(["a", "type", "role", "content", ""]): value(rng, depth - 1) for _ in range(2)}
    return rng.choice(ODD_VALUES)
