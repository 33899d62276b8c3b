"""The API's side of the engine: one object that submits requests and delivers what comes back.

A thread reads the engine's messages and turns tokens into text, so neither decoding takes the event loop's
time. Everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import Detokenizer
from diptych.shared.server.engine.engine_process import EngineHandle, spawn_engine
from diptych.shared.server.engine.messages import (
    VERSION,
    Abort,
    Control,
    Dead,
    Finish,
    FromEngine,
    Generate,
    Heartbeat,
    Load,
    Outputs,
    Ready,
    Reply,
    RequestOutput,
    ToEngine,
    decode_from_engine,
    encode,
    reason_of,
)
from diptych.shared.types import TokenLogprob

POLL_INTERVAL = 0.2
"""Seconds between two looks at whether the engine still lives."""


ABORTED = "aborted"
"""The engine's message for an abort. Who asked for it, the API knows."""


class EngineDead(RuntimeError):
    """The engine has ended; so has every request."""


@dataclass
class Delta:
    """What has come for one sample since the last look: several engine outputs merge into one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    num_cached_tokens: int = 0
    num_accepted_tokens: int = 0
    queue_time: float | None = None  # in the first delta of a sample
    embedding: list[float] | None = None
    weight_version: int = 0

    @property
    def is_incomplete(self) -> bool:
        """Only a part of the prompt's log-probabilities, which come before the first token."""
        return bool(self.input_logprobs) and not self.token_ids and self.finish is None

    def split(self, num_tokens: int) -> tuple[Delta, Delta | None]:
        """So many tokens, with the whole text, and the rest."""
        if len(self.token_ids) <= num_tokens:
            return self, None
        ids, logprobs = self.token_ids, self.logprobs
        first = replace(
            self, token_ids=ids[:num_tokens], logprobs=logprobs[:num_tokens], finish=None, embedding=None
        )
        rest = replace(
            self, text="", token_ids=ids[num_tokens:], logprobs=logprobs[num_tokens:], input_logprobs=[],
            queue_time=None,
        )  # fmt: skip
        return first, rest

    def merge(self, later: Delta) -> None:
        """Append what came later."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.input_logprobs += later.input_logprobs
        self.finish = later.finish or self.finish
        self.embedding = later.embedding
        self.weight_version = later.weight_version
        self.num_cached_tokens = later.num_cached_tokens
        self.num_accepted_tokens = later.num_accepted_tokens


@dataclass
class Live:
    """A request that the engine works on. `deliver` is called on the event loop."""

    detokenizer: Detokenizer | None
    deliver: Callable[[Delta], None]
    name: str | None = None  # an id of the client's; several requests may have the same
    owner: str = ""  # of the request: a digest of the client's key
    end_reason: str = ""  # why it was aborted, in words for the client


class EngineClient:
    """Start with `start`, end with `stop`. All methods but `_receive` run on the event loop's thread."""

    def __init__(self, config: EngineConfig, *, in_thread: bool) -> None:
        chosen = config.use.get("detokenizer", "reference")
        self.detokenizer: type[Detokenizer] = registry.load("detokenizer", chosen)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._handle: EngineHandle = spawn_engine(config, self._context, in_thread=in_thread)
        self._to_engine = self._bind(zmq.PUSH, self._handle.endpoints.to_engine)
        self._from_engine = self._bind(zmq.PULL, self._handle.endpoints.from_engine)
        self._lives: dict[str, Live] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count(1)
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receiver = threading.Thread(target=self._receive, name="receive", daemon=True)
        self.ready: asyncio.Future[Ready] | None = None
        self.died: asyncio.Event | None = None
        self.death_reason = ""
        self.load = Load()
        self.last_beat = 0.0  # time.monotonic() when the engine's counter last grew

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    # ---- life ----

    async def start(self) -> Ready:
        """Start the engine and wait until it can serve. Raises `EngineDead` with its reason."""
        self._loop = asyncio.get_running_loop()
        self.ready = self._loop.create_future()
        self.died = asyncio.Event()
        worker = self._handle.process or self._handle.thread
        assert worker is not None
        worker.start()
        self._receiver.start()
        ready = await self.ready
        if ready.version != VERSION:
            raise EngineDead(f"the engine speaks protocol version {ready.version}, this server {VERSION}")
        return ready

    @property
    def is_alive(self) -> bool:
        return self.died is not None and not self.died.is_set()

    @property
    def num_live(self) -> int:
        return len(self._lives)

    async def stop(self, timeout: float = 10.0) -> None:
        """End the engine, politely at first."""
        self._is_stopping = True
        if self.is_alive:
            with contextlib.suppress(EngineDead, asyncio.TimeoutError):
                await asyncio.wait_for(self.control("stop"), timeout)
        await asyncio.to_thread(self._handle.join, timeout)
        if self._receiver.is_alive():
            await asyncio.to_thread(self._receiver.join, timeout)
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()

    # ---- requests ----

    def generate(self, message: Generate, live: Live) -> None:
        """Submit a request; `live.deliver` gets its deltas, the last one with a finish. Raises
        `OverflowError` for an integer beyond 64 bits."""
        if not self.is_alive:
            raise EngineDead(self.death_reason)
        data = encode(message)  # may raise: then nothing of the request is left
        self._lives[message.rid] = live
        self._to_engine.send(data)

    def rids_of(self, name: str, owner: str | None = None) -> list[str]:
        """The live requests with this id, which is a client's or one of the server's own. `owner`: only those
        of this client."""
        found = [(rid, live) for rid, live in self._lives.items() if name in (rid, live.name)]
        return [rid for rid, live in found if owner in (None, live.owner)]

    def abort(self, rids: Iterable[str], reason: str = "") -> int:
        """End requests that have not ended; returns their number. Their state stays until the engine confirms
        the end. reason: the message of their error."""
        alive = [rid for rid in rids if rid in self._lives]
        self.set_end_reason(reason, alive)
        if alive and self.is_alive:
            self._send(Abort(rids=alive))
        return len(alive)

    def set_end_reason(self, reason: str, rids: Iterable[str] | None = None) -> None:
        """The message of these requests, or of all, if they end by an abort."""
        for rid in [*self._lives] if rids is None else rids:
            self._lives[rid].end_reason = reason

    async def control(self, action: str, **args: Any) -> dict[str, Any]:
        """Run an action of the engine. Raises `ValueError` for an integer beyond 64 bits, and if the engine
        refuses it."""
        if not self.is_alive:
            raise EngineDead(self.death_reason)
        call_id = next(self._call_ids)
        try:
            data = encode(Control(call_id=call_id, action=action, args=args))
        except OverflowError:
            raise ValueError("an integer of the request exceeds 64 bits") from None
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._to_engine.send(data)
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def _send(self, message: ToEngine) -> None:
        self._to_engine.send(encode(message))  # never blocks: the high-water mark is off

    # ---- the receiving thread ----

    def _receive(self) -> None:
        try:
            while True:
                if self._from_engine.poll(int(POLL_INTERVAL * 1000)):
                    message = decode_from_engine(self._from_engine.recv())
                    if isinstance(message, Dead):
                        self._call_soon(self._on_dead, message.reason)
                        return
                    self._dispatch(message)
                elif not self._handle.is_alive:
                    self._call_soon(self._on_dead, self._handle.describe_end())
                    return
        except Exception as error:
            self._call_soon(self._on_dead, f"the engine's messages cannot be read: {error}")

    def _dispatch(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._call_soon(self._deliver, [self._delta(output) for output in message.outputs])
        else:
            self._call_soon(self._on_message, message)

    def _delta(self, output: RequestOutput) -> tuple[str, Delta]:
        """Make the delta of an output, with its text."""
        delta = Delta(
            token_ids=output.new_token_ids,
            logprobs=output.output_logprobs,
            input_logprobs=output.input_logprobs,
            finish=output.finish,
            num_cached_tokens=output.num_cached_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
            queue_time=output.queue_time,
            embedding=output.embedding,
            weight_version=output.weight_version,
        )
        live = self._lives.get(output.rid)
        if live is not None and live.detokenizer is not None:
            reason = reason_of(output.finish) if output.finish is not None else None
            delta.text = live.detokenizer.append(output.new_token_ids, reason)
        return output.rid, delta

    def _call_soon(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(function, *args)

    # ---- on the event loop ----

    def _deliver(self, deltas: list[tuple[str, Delta]]) -> None:
        for rid, delta in deltas:
            live = self._lives.get(rid)
            if live is None:
                continue
            if delta.finish is not None:
                del self._lives[rid]
                if delta.finish.message == ABORTED and live.end_reason:
                    delta.finish.message = live.end_reason
            live.deliver(delta)

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            assert self.ready is not None
            self.last_beat = time.monotonic()
            if not self.ready.done():
                self.ready.set_result(message)
        elif isinstance(message, Heartbeat):
            self.load = message.load
            self.last_beat = time.monotonic()
        elif isinstance(message, Reply):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                if message.error is None:
                    future.set_result(message.result)
                else:
                    future.set_exception(ValueError(message.error))

    def _on_dead(self, reason: str) -> None:
        """Every request and call ends with an error, once."""
        assert self.died is not None
        assert self.ready is not None
        if self.died.is_set():
            return
        self.death_reason = reason
        self.died.set()
        if not self.ready.done():
            self.ready.set_exception(EngineDead(reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(reason))
        lives, self._lives = self._lives, {}
        for live in lives.values():
            live.deliver(Delta(finish=Finish(kind="error", message=f"the engine died: {reason}", status=503)))
