"""The input log: the calls of rank 0's scheduler, as messages for the other ranks.

Every rank runs the whole engine and makes the same decisions, because its scheduler gets the same calls in
the same order, with the same time. Only rank 0 reads sockets and clocks, and compiles grammars.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Literal

import msgspec

from diptych.shared import registry
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import Scheduler
from diptych.shared.parallel.channel import decoder
from diptych.shared.types import Req, SamplingParams

Method = Literal[
    "add_request", "abort", "retract", "step", "flush_cache", "forget_kv", "report", "run", "split",
    "regroup", "hear",
]  # fmt: skip


PACKAGE = "diptych."
"""Of the functions of `run`."""


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
    grammar: str | None  # compiled
    is_pooling: bool
    prefill_server: str | None = None


class Call(msgspec.Struct):
    """One call of the scheduler. `now`: its clock, in seconds."""

    method: Method
    now: float
    rid: str = ""  # of abort and retract
    request: Request | None = None  # of add_request
    function: str = ""  # of run: module:function, called with the engine and
    arguments: list[Any] = []  # and those of regroup and hear


_encoder = msgspec.msgpack.Encoder()
_decode = decoder(Call)


def encode(call: Call) -> bytes:
    """Raises `ValueError` for an integer beyond 64 bits."""
    try:
        return _encoder.encode(call)
    except OverflowError:
        raise ValueError("with several ranks or replicas an integer may have at most 64 bits") from None


def decode(data: bytes | bytearray) -> Call:
    """Raises `ValueError` for anything but a Call, and for one of a function of another package."""
    call: Call = _decode(data)
    if call.method == "run" and not call.function.startswith(PACKAGE):
        raise ValueError(f"{call.function!r:.100} is no function of the engine")
    return call


class CallClock:
    """The clock of a scheduler with several ranks: the time of the latest call, the same on all ranks."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now

    def follow(self, call: Call) -> None:
        """Follow a call on another rank: the time is that of rank 0's call, not the rank's own."""
        self.now = call.now


def request_of(req: Req, grammars: GrammarCompiler) -> Request:
    return Request(
        req.rid,
        req.origin_input_ids,
        req.sampling_params,
        req.seed,
        sorted(req.eos_token_ids),
        req.extra_key,
        req.priority,
        req.routing_key,
        grammars.as_text(req.sampling_params) if req.grammar is not None else None,
        req.is_pooling,
        req.prefill_server,
    )


def apply(call: Call, scheduler: Scheduler, grammars: GrammarCompiler, engine: object = None) -> Req | None:
    """Make the call in another process. `engine`: what a function of `run` gets. Returns the request, if the
    call adds one."""
    if call.method == "add_request":
        assert call.request is not None
        req = req_of(call.request, grammars)
        with contextlib.suppress(ValueError):  # rank 0 refuses it too
            scheduler.add_request(req)
        return req
    if call.method == "run":
        with contextlib.suppress(ValueError):  # the caller raises it too
            registry.load("the function", call.function)(engine, *call.arguments)
    elif call.method in ("abort", "retract"):
        getattr(scheduler, call.method)(call.rid)
    else:
        getattr(scheduler, call.method)()
    return None


def req_of(request: Request, grammars: GrammarCompiler) -> Req:
    """The request in another process."""
    req = Req(
        rid=request.rid,
        origin_input_ids=request.input_ids,
        sampling_params=request.params,
        seed=request.seed,
        eos_token_ids=frozenset(request.eos_token_ids),
        extra_key=request.extra_key,
        priority=request.priority,
        routing_key=request.routing_key,
        is_pooling=request.is_pooling,
        prefill_server=request.prefill_server,
    )
    if request.grammar is not None:
        req.grammar = grammars.grammar_for(req, grammars.from_text(request.grammar))
    return req
