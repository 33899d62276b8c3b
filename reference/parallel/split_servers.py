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
from collections.abc import Callable, Sequence

from diptych.reference.parallel.disaggregation import POLL_SECONDS, DecodeSide, PrefillEngines, PrefillSide
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import Scheduler, SchedulerParts, SchedulerState, SchedulerStats, Transport
from diptych.shared.parallel.channel import Channel, Listener, connect, verified
from diptych.shared.types import Req, StepOutput

RETRY_SECONDS = 2.0
"""Until a lost prefill server is tried again."""
MakeTransport = Callable[[Channel], Transport]


class PrefillServer(Scheduler):
    """The scheduler of a prefill server. Its requests come from decode servers alone."""

    def __init__(self, scheduler: Scheduler, parts: SchedulerParts, grammars: GrammarCompiler,
                 make: MakeTransport, listener: Listener) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.parts = parts
        self.grammars = grammars
        self.make = make
        self.listener = listener
        self.port = listener.port
        self.sides: list[PrefillSide] = []
        self._joined: queue.SimpleQueue[Transport] = queue.SimpleQueue()
        self._num_joined = 0
        threading.Thread(target=self._accept, name="decode servers", daemon=True).start()

    # --8<-- [start:prefill-server-step]
    def step(self) -> list[StepOutput]:
        while not self._joined.empty():
            self._num_joined += 1
            name = f"{self._num_joined}/"
            joined = self._joined.get()
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

    def add_request(self, req: Req) -> None:
        raise ValueError("this server computes prompts for decode servers: send requests to one of those")

    def abort(self, rid: str) -> bool:
        return False

    def retract(self, rid: str) -> bool:
        return self.scheduler.retract(rid)

    def has_work(self) -> bool:
        return True  # prompts come between any two steps

    def close(self) -> None:
        """Take no more connections, and end those that there are."""
        self.listener.close()
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
        """The server that the request names, or else the one with the fewest open rooms."""
        if req.prefill_server is not None:
            self._connect(req.prefill_server)
        with self._lock:
            alive = {name: found for name, found in self._found.items() if not found.is_lost}
        if req.prefill_server in alive:
            return alive[req.prefill_server]
        return min(alive.values(), key=lambda transport: busy[transport], default=None)

    def is_connecting(self, req: Req) -> bool:
        with self._lock:
            return req.prefill_server in self._connecting or (not self._found and bool(self._connecting))

    def is_alive(self) -> bool:
        """Whether a server is connected. Connects those in `known` that are not."""
        for address in self.known:
            self._connect(address)
        return any(not transport.is_lost for transport in self.transports())

    def close(self) -> None:
        """End all connections."""
        for transport in self.transports():
            transport.close()

    def _connect(self, address: str) -> None:
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
