"""The input log: what rank 0 does to its scheduler, as messages for the other ranks.

Every rank runs the whole engine and comes to the same decisions, because its scheduler gets the same calls in
the same order, with the same time. Rank 0 alone reads sockets and clocks, and compiles grammars first.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from shared.types import SamplingParams

Method = Literal["add_request", "abort", "retract", "step", "flush_cache"]


class Request(msgspec.Struct):
    """The fields of a Req that are written at submission."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: list[int]
    extra_key: str | None
    priority: int
    routing_key: str | None
    has_grammar: bool


class Call(msgspec.Struct):
    """One call of the scheduler. `now`: its clock, in seconds."""

    method: Method
    now: float
    rid: str = ""  # of abort and retract
    request: Request | None = None  # of add_request


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Call)


def encode(call: Call) -> bytes:
    return _encoder.encode(call)


def decode(data: bytes) -> Call:
    """Raises `msgspec.ValidationError` for anything but a Call."""
    return _decoder.decode(data)


class CallClock:
    """The clock of a scheduler with several ranks: the time of the latest call, the same on all ranks."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now
