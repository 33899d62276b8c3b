"""A prefill server or a decode server of several ranks.

Every rank has the side of its server, around its own scheduler, and makes the same decisions. Only rank 0 has
connections. What has come over them goes to all ranks with each step, and no rank decides by anything else:

    rank 0     read what has come; send it to the other ranks with the call of the step
    all ranks  take it; then poll, allocate and free as in a server of one rank
    all ranks  gather the heads of a prompt on rank 0, or get their own heads of one that has come
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from diptych.reference.parallel.disaggregation import POLL_SECONDS, PrefillEngines
from diptych.reference.parallel.split_servers import (
    DecodeServers,
    PrefillServers,
    choose_server,
    waits_for_server,
)
from diptych.reference.parallel.whole_pages import Contents, HeadParts, WholeTransport
from diptych.shared.engine.processes.ranks import LeadScheduler
from diptych.shared.interfaces import Scheduler, SchedulerState, SchedulerStats
from diptych.shared.interfaces import transport as interface
from diptych.shared.interfaces.transport import TransferStatus
from diptych.shared.parallel.channel import decoder
from diptych.shared.types import Req, StepOutput

LONGEST_WAIT = 1.0
"""Seconds after which a step is made though nothing has come: transfers have a time limit."""


class Heard(msgspec.Struct, array_like=True):
    """What has come over one connection."""

    number: int  # of the connection
    ended: dict[str, TransferStatus]  # rooms
    messages: list[bytes]
    is_lost: bool


class Inputs(msgspec.Struct, array_like=True):
    """What has come between two steps."""

    opened: list[int] = []  # connections that are new
    heard: list[Heard] = []
    servers: dict[str, int] = {}  # of a decode server: address -> connection of each prefill server
    connecting: list[str] = []  # addresses


encode = msgspec.msgpack.Encoder().encode
decode = decoder(Inputs)


class RankTransport(interface.Transport):
    """A connection as each rank knows it: by what `hear` was given. `real`: the connection, on rank 0."""

    def __init__(self, real: WholeTransport | None, parts: HeadParts) -> None:
        self.real = real
        self.parts = parts
        self.is_lost = False
        self.rooms: dict[str, tuple[Sequence[int], int | None] | None] = {}  # pages and row of a receiver
        self._ended: dict[str, TransferStatus] = {}
        self._messages: list[bytes] = []

    def read(self, number: int) -> Heard | None:
        """On rank 0: what has come since the last call; None: nothing."""
        assert self.real is not None
        polled = {room: self.real.poll(room) for room in self.rooms if room not in self._ended}
        ended: dict[str, TransferStatus] = {
            room: status for room, status in polled.items() if status != "open"
        }
        heard = Heard(number, ended, self.real.messages(), self.real.is_lost)  # in this order
        return heard if ended or heard.messages or heard.is_lost != self.is_lost else None

    def hear(self, heard: Heard) -> None:
        """On every rank."""
        self._ended |= heard.ended
        self._messages += heard.messages
        self.is_lost = heard.is_lost

    def open_sender(self, room: str) -> None:
        self.rooms[room] = None
        if self.real is not None:
            self.real.open_sender(room)

    def open_receiver(self, room: str, pages: Sequence[int], row: int | None = None) -> None:
        self.rooms[room] = pages, row
        if self.real is not None:
            self.real.open_receiver(room, pages, row)

    def send(
        self,
        room: str,
        source_pages: Sequence[int],
        target_pages: Sequence[int],
        source_row: int | None = None,
        target_row: int | None = None,
    ) -> None:
        contents = self.parts.gather(source_pages, source_row)
        if self.real is not None:
            self.real.send_contents(room, contents, target_pages, target_row)

    # --8<-- [start:poll-on-every-rank]
    def poll(self, room: str) -> TransferStatus:
        """The same on every rank. Pages are written before the room is done."""
        opened = self.rooms[room]
        status = self._ended.pop(room, "open")
        if status != "open":
            del self.rooms[room]
            contents: Contents = self.real.take(room) if self.real is not None else {}
            if status == "done" and opened is not None:
                self.parts.scatter(opened[0], contents, opened[1])
        return status

    # --8<-- [end:poll-on-every-rank]

    def abort(self, room: str) -> None:
        if self.real is not None:
            self.real.abort(room)

    def post(self, message: bytes) -> None:
        if self.real is not None:
            self.real.post(message)

    def messages(self) -> list[bytes]:
        found, self._messages = self._messages, []
        return found

    def close(self) -> None:
        if self.real is not None:
            self.real.close()


class Links:
    """The connections of a server by number, the same on every rank."""

    def __init__(self, parts: HeadParts) -> None:
        self.parts = parts
        self.links: dict[int, RankTransport] = {}
        self._real: dict[int, WholeTransport] = {}  # on rank 0
        self._num_opened = 0

    def open(self, real: WholeTransport) -> int:
        """On rank 0: the number of a new connection."""
        self._num_opened += 1
        self._real[self._num_opened] = real
        return self._num_opened

    def read(self) -> list[Heard]:
        heard = [link.read(number) for number, link in self.links.items()]
        return [each for each in heard if each is not None]

    def take(self, inputs: Inputs) -> None:
        """On every rank. A lost connection is forgotten when nothing more has come over it."""
        numbers = {heard.number for heard in inputs.heard}
        for number, link in [*self.links.items()]:
            if link.is_lost and not link.rooms and number not in numbers:
                self._real.pop(number, None)
                del self.links[number]
        for number in inputs.opened:
            self.links[number] = RankTransport(self._real.get(number), self.parts)
        for heard in inputs.heard:
            self.links[heard.number].hear(heard)


class RankDecodeServers(DecodeServers):
    """The decode servers of a prefill server, on one rank. `real`: on rank 0."""

    def __init__(self, real: DecodeServers | None, parts: HeadParts) -> None:
        self.real = real
        self.links = Links(parts)
        self.port = real.port if real is not None else 0
        self._new: list[RankTransport] = []

    def read(self, side: Any) -> tuple[Inputs, bool]:
        """On rank 0: what has come since the last call, and whether anything has."""
        assert self.real is not None
        opened = [self.links.open(transport) for transport in self.real.new()]  # type: ignore[arg-type]
        inputs = Inputs(opened, self.links.read())
        return inputs, bool(opened or inputs.heard)

    def take(self, inputs: Inputs) -> None:
        """On every rank."""
        self.links.take(inputs)
        self._new += [self.links.links[number] for number in inputs.opened]

    def new(self) -> list[interface.Transport]:
        found, self._new = self._new, []
        return [*found]

    def close(self) -> None:
        if self.real is not None:
            self.real.close()


class RankPrefillServers(PrefillEngines):
    """The prefill servers of a decode server, on one rank. `real`: on rank 0."""

    def __init__(self, real: PrefillServers | None, parts: HeadParts, secret: bytes) -> None:
        self.real = real
        self.links = Links(parts)
        self.secret = secret
        self.known = real.known if real is not None else ()
        self._inputs = Inputs()
        self._numbers: dict[interface.Transport, int] = {}  # on rank 0

    def read(self, side: Any) -> tuple[Inputs, bool]:
        """On rank 0: what has come since the last call, and whether anything has."""
        assert self.real is not None
        for req in side.waiting:
            if req.prefill_server is not None:
                self.real.connect(req.prefill_server)
        servers, connecting = self.real.snapshot()
        new: list[Any] = [each for each in servers.values() if each not in self._numbers]
        self._numbers = {each: self._numbers[each] for each in servers.values() if each in self._numbers}
        self._numbers |= {each: self.links.open(each) for each in new}
        inputs = Inputs(
            [self._numbers[each] for each in new],
            self.links.read(),
            {address: self._numbers[each] for address, each in servers.items()},
            connecting,
        )
        before = self._inputs.servers, self._inputs.connecting
        return inputs, bool(new or inputs.heard or (inputs.servers, connecting) != before)

    def take(self, inputs: Inputs) -> None:
        """On every rank."""
        self.links.take(inputs)
        self._inputs = inputs

    def _found(self) -> dict[str, interface.Transport]:
        found = self._inputs.servers.items()
        return {address: self.links.links[number] for address, number in found if number in self.links.links}

    def transports(self) -> Sequence[interface.Transport]:
        return [*self._found().values()]

    def choose(self, req: Req, busy: Counter[interface.Transport]) -> interface.Transport | None:
        return choose_server(req, busy, self._found())

    def is_connecting(self, req: Req) -> bool:
        return waits_for_server(req, self._found(), self._inputs.connecting)

    def is_alive(self) -> bool:
        """Whether a server is connected. On rank 0."""
        return self.real is not None and self.real.is_alive()

    def close(self) -> None:
        if self.real is not None:
            self.real.close()


def step_with(engine: Any, data: bytes) -> list[StepOutput]:
    """One step of the side of each rank. `engine`: what has its scheduler."""
    side = engine.scheduler
    side.peers.take(decode(data))
    outputs: list[StepOutput] = side.step()
    return outputs


class SplitRanks(Scheduler):
    """The scheduler of such a server, on rank 0."""

    def __init__(self, lead: LeadScheduler) -> None:
        self.lead = lead
        self.side: Any = lead.scheduler
        self.port = getattr(self.side, "port", None)
        self._last = 0.0

    # --8<-- [start:step-of-split-ranks]
    def step(self) -> list[StepOutput]:
        inputs, has_come = self.side.peers.read(self.side)
        is_due = time.monotonic() > self._last + LONGEST_WAIT
        if not (has_come or is_due or self.side.has_tasks() or self.lead.has_ended()):
            time.sleep(POLL_SECONDS)
            return []
        self._last = time.monotonic()
        with self.lead.watchdog.working():
            return self.lead.run(step_with, self.lead, encode(inputs))

    # --8<-- [end:step-of-split-ranks]

    def add_request(self, req: Req) -> None:
        self.lead.add_request(req)

    def abort(self, rid: str) -> bool:
        return self.lead.abort(rid)

    def retract(self, rid: str) -> bool:
        return self.lead.retract(rid)

    def has_work(self) -> bool:
        return bool(self.side.has_work()) or self.lead.has_work()

    def flush_cache(self) -> bool:
        return self.lead.flush_cache()

    def state(self) -> SchedulerState:
        return self.lead.state()

    def stats(self) -> SchedulerStats:
        return self.lead.stats()

    @property
    def not_ready(self) -> str | None:  # type: ignore[override]
        not_ready: str | None = self.side.not_ready
        return not_ready

    def close(self) -> None:
        self.side.close()
