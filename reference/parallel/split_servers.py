"""Servers that compute prompts, and servers that decode, any number of each, on one or several computers.

A decode server connects to the prefill servers that its requests name, and each connection has a transport.
Both ends of a connection prove the secret of the cluster.

    router        chooses both servers of a request, and sends it to the decode server with the address of the
                  prefill server, which it has signed
    decode        sends the prompt to the prefill server, receives its KV, and answers
    prefill       computes prompts of all decode servers in the batches of one scheduler
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from diptych.reference.parallel.disaggregation import POLL_SECONDS, DecodeSide, PrefillEngines, PrefillSide
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import Scheduler, SchedulerParts, SchedulerState, SchedulerStats, Transport
from diptych.shared.parallel.channel import Channel, Listener, connect, verified
from diptych.shared.types import Req, StepOutput

RETRY_SECONDS = 2.0
"""Until a lost prefill server is tried again."""
MakeTransport = Callable[[Channel], Transport]


class DecodeServers:
    """The connections of a prefill server."""

    def __init__(self, make: MakeTransport, listener: Listener) -> None:
        self.make = make
        self.listener = listener
        self.port = listener.port
        self._joined: queue.SimpleQueue[Transport] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="decode servers", daemon=True).start()

    def new(self) -> list[Transport]:
        """Those that have connected since the last call."""
        found = []
        while not self._joined.empty():
            found.append(self._joined.get())
        return found

    def close(self) -> None:
        """Take no more connections."""
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                channel = self.listener.accept(seconds=None)
                threading.Thread(target=self._join, args=(channel,), daemon=True).start()

    def _join(self, channel: Channel) -> None:
        """Wait for the greeting of the transport at the other end, in a thread of its own."""
        try:
            self._joined.put(self.make(channel))
        except (OSError, EOFError, ValueError) as error:
            print(f"a decode server cannot be connected: {error}", file=sys.stderr)
            channel.close()


class PrefillServer(Scheduler):
    """The scheduler of a prefill server. Its requests come from decode servers alone."""

    def __init__(self, scheduler: Scheduler, parts: SchedulerParts, grammars: GrammarCompiler,
                 peers: DecodeServers) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.parts = parts
        self.grammars = grammars
        self.peers = peers
        self.port = peers.port
        self.sides: list[PrefillSide] = []
        self._num_joined = 0

    # --8<-- [start:prefill-server-step]
    def step(self) -> list[StepOutput]:
        for joined in self.peers.new():
            self._num_joined += 1
            name = f"{self._num_joined}/"
            self.sides.append(PrefillSide(self.scheduler, self.parts, self.grammars, joined, name))
        for side in self.sides:
            side.receive()
        outputs = self.scheduler.step() if self.scheduler.has_work() else []
        for side in self.sides:
            side.send(outputs)
        self.sides = [side for side in self.sides if not side.has_ended]
        if not self.scheduler.has_work():
            time.sleep(POLL_SECONDS)
        return []

    # --8<-- [end:prefill-server-step]

    def add_request(self, req: Req) -> None:
        raise ValueError("this server computes prompts for decode servers: send requests to one of those")

    def abort(self, rid: str) -> bool:
        return False

    def retract(self, rid: str) -> bool:
        return self.scheduler.retract(rid)

    def has_work(self) -> bool:
        return True  # prompts come between any two steps

    def has_tasks(self) -> bool:
        """Whether a step has something to do, even if nothing has come."""
        return self.scheduler.has_work()

    def close(self) -> None:
        """Take no more connections, and end those that there are."""
        self.peers.close()
        for side in self.sides:
            side.transport.close()

    def flush_cache(self) -> bool:
        is_sending = any(side.prefill or side.in_flight for side in self.sides)
        return not is_sending and self.scheduler.flush_cache()

    def state(self) -> SchedulerState:
        return self.scheduler.state()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()


class DecodeServer(DecodeSide):
    """The scheduler of a decode server, which lives on when prefill servers end."""

    prefill_engines: PrefillServers
    problem = None

    def add_request(self, req: Req) -> None:
        if req.prefill_server is not None:
            req.prefill_server = verified(req.prefill_server, self.prefill_engines.secret)
        super().add_request(req)

    @property
    def not_ready(self) -> str | None:  # type: ignore[override]
        known = self.prefill_engines.known
        is_ready = self.prefill_engines.is_alive() or not known
        return None if is_ready else f"no prefill server answers: {', '.join(known)}"

    @property
    def peers(self) -> PrefillServers:
        return self.prefill_engines

    def has_tasks(self) -> bool:
        """Whether a step has something to do, even if nothing has come."""
        return bool(self.waiting or self.outputs) or self.scheduler.has_work()

    def close(self) -> None:
        self.prefill_engines.close()


class PrefillServers(PrefillEngines):
    """The connections of a decode server, by address. Those in `known` are connected at once, and again after
    a loss; others when a request names them."""

    def __init__(self, make: MakeTransport, secret: bytes, known: Sequence[str] = ()) -> None:
        self.make = make
        self.secret = secret
        self.known = tuple(known)
        self._found: dict[str, Transport] = {}
        self._retry_at: dict[str, float] = {}
        self._connecting: set[str] = set()
        self._lock = threading.Lock()  # of the three above

    def transports(self) -> Sequence[Transport]:
        with self._lock:
            return [*self._found.values()]

    def choose(self, req: Req, busy: Counter[Transport]) -> Transport | None:
        if req.prefill_server is not None:
            self.connect(req.prefill_server)
        return choose_server(req, busy, self.snapshot()[0])

    def is_connecting(self, req: Req) -> bool:
        return waits_for_server(req, *self.snapshot())

    def snapshot(self) -> tuple[dict[str, Transport], list[str]]:
        """The transports by address, the lost ones included, and what is just being connected."""
        with self._lock:
            return {**self._found}, sorted(self._connecting)

    def is_alive(self) -> bool:
        """Whether a server is connected. Connects those in `known` that are not."""
        for address in self.known:
            self.connect(address)
        return any(not transport.is_lost for transport in self.transports())

    def close(self) -> None:
        """End all connections."""
        for transport in self.transports():
            transport.close()

    def connect(self, address: str) -> None:
        """Connect in a thread, unless it is connected or was tried a moment ago."""
        with self._lock:
            found = self._found.get(address)
            is_tried = address in self._connecting or time.monotonic() < self._retry_at.get(address, 0.0)
            if is_tried or (found is not None and not found.is_lost):
                return
            self._connecting.add(address)
        threading.Thread(target=self._open, args=(address,), name="connect", daemon=True).start()

    def _open(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        transport = None
        try:
            transport = self.make(connect(host.strip("[]"), int(port), self.secret))
        except (OSError, EOFError, ValueError) as error:
            print(f"prefill server {address}: {error}", file=sys.stderr)
        with self._lock:
            self._connecting.discard(address)
            self._retry_at[address] = time.monotonic() + RETRY_SECONDS
            if transport is not None:
                self._found[address] = transport


def choose_server(req: Req, busy: Counter[Transport], servers: Mapping[str, Transport]) -> Transport | None:
    """The server that the request names, or else the one with the fewest open rooms. servers: by address."""
    alive = {address: found for address, found in servers.items() if not found.is_lost}
    if req.prefill_server in alive:
        return alive[req.prefill_server]
    return min(alive.values(), key=lambda transport: busy[transport], default=None)


def waits_for_server(req: Req, servers: Mapping[str, Transport], connecting: Sequence[str]) -> bool:
    """Whether a request should wait because a server that is being connected may take it."""
    return req.prefill_server in connecting or (not servers and bool(connecting))
