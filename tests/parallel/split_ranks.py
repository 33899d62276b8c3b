"""Split servers of several ranks, for tests: whose ranks are threads of this process, or processes."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx

from diptych.reference.parallel.transport import Frame, Transport
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.processes.input_log import CallClock, decode
from diptych.shared.engine.processes.ranks import LeadScheduler, collectives_of, repeat
from diptych.shared.engine.processes.split_engine import split_scheduler
from diptych.shared.parallel import channel
from diptych.shared.scheduling.invariants import check_idle
from diptych.shared.types import Req
from tests.server.running import RunningServer, serving

SECONDS = 20.0
SECRET = b"a secret of the cluster"
ENDED: dict[str, Any] = {
    "end": lambda: None,
    "report": lambda: None,
    "describe_end": lambda: "rank 1 has ended",
}
"""Of a rank's handle."""


class Server:
    """A split server of `size` ranks."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        from torch.distributed import HashStore

        self.config, self.store = config.updated(tp=size), HashStore()
        self.clocks = [CallClock() for _ in range(size)]
        with ThreadPoolExecutor(size) as threads:
            self.assemblies = list(threads.map(self._assemble, range(size)))
        self.calls: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size - 1)]
        self.errors: list[BaseException] = []
        first, self._pipes = self.assemblies[0], [channel.pair() for _ in self.calls]
        self.followers = [threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, size)]
        for follower in self.followers:
            follower.start()
        if size > 1:
            children: Any = [
                SimpleNamespace(name=f"rank {rank}", call=calls.put, pipe=own, process=None, **ENDED)
                for rank, (calls, (own, _)) in enumerate(zip(self.calls, self._pipes), 1)
            ]
            lead = LeadScheduler(first.scheduler, first.grammars, children, self.clocks[0], first.tp)
            self.scheduler = split_scheduler(replace(first, scheduler=lead))
            self.side: Any = lead.scheduler
        else:
            self.side = self.scheduler = split_scheduler(first)

    def _assemble(self, rank: int) -> Assembly:
        size = self.config.tp
        tp = collectives_of(self.config)(self.store, rank, size, SECONDS) if size > 1 else None
        return assemble(self.config, self.clocks[rank], tp=tp)

    def _follow(self, rank: int) -> None:
        try:
            while (call := self.calls[rank - 1].get()) is not None:
                if callable(call):
                    call(rank, self.assemblies[rank])
                else:
                    self.assemblies[rank] = repeat(decode(call), self.assemblies[rank], self.clocks[rank])
        except BaseException as error:
            self.errors.append(error)

    def on_each(self, function: Callable[[Assembly], Any]) -> list[Any]:
        """Its results on all ranks, after all their calls."""
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def call(rank: int, assembly: Assembly) -> None:
            try:
                results.put((rank, function(assembly), None))
            except AssertionError as error:
                results.put((rank, None, error))

        for calls in self.calls:
            calls.put(call)
        call(0, self.assemblies[0])
        found = sorted((results.get(timeout=SECONDS) for _ in self.assemblies), key=lambda each: each[0])
        for _, _, error in found:
            if error is not None:
                raise error
        return [result for _, result, _ in found]

    def check_whole(self) -> None:
        """Nothing is owned by anything on any rank, and all have cached the same in the same slots."""

        def cached(assembly: Assembly) -> list[int]:
            parts = assembly.parts
            check_idle(parts.allocator, parts.req_to_token_pool, parts.tree_cache)
            slots: list[int] = parts.allocator.free_slots().tolist()
            return slots

        first, *others = self.on_each(cached)
        assert all(other == first for other in others)
        assert self.scheduler.flush_cache()
        sizes = self.on_each(lambda each: each.parts.allocator.size - each.parts.allocator.available_size())
        assert sizes == [0] * self.config.tp

    def close(self) -> None:
        self.scheduler.close()
        for calls in self.calls:
            calls.put(None)
        for follower in self.followers:
            follower.join(SECONDS)


class Cluster:
    """Prefill servers and a decode server, connected. `hold()` keeps their transports from sending pages."""

    def __init__(self, config: EngineConfig, sizes: tuple[int, ...], secret: Path) -> None:
        """sizes: numbers of ranks; the last one is that of the decode server."""
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        config = config.updated(check_invariants=False, cluster_secret_file=str(secret))
        self.gate, self.is_copying = threading.Event(), threading.Event()
        self.gate.set()
        self.prefills = [Server(config.updated(disaggregation_mode="prefill"), size) for size in sizes[:-1]]
        self.addresses = [f"127.0.0.1:{prefill.side.port}" for prefill in self.prefills]
        known = ",".join(self.addresses)
        self.decode = Server(config.updated(disaggregation_mode="decode", prefill_servers=known), sizes[-1])
        self.decode_side = self.decode.side
        engines = self.decode_side.prefill_engines
        engines.is_alive()  # connects those that it knows
        self.until(lambda: len(engines.transports()) == len(self.prefills))
        self.until(lambda: all(prefill.side.sides for prefill in self.prefills))
        self.sides = [prefill.side.sides[0] for prefill in self.prefills]
        self.prefill_side = self.sides[0]

    @property
    def servers(self) -> list[Server]:
        return [*self.prefills, self.decode]

    def add(self, req: Req) -> None:
        self.decode.scheduler.add_request(req)

    def step(self) -> None:
        for server in self.servers:
            server.scheduler.step()

    def until(self, holds: Callable[[], bool], turns: str = "both") -> None:
        limit = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < limit
            turn = {"both": self.servers, "prefill": self.prefills, "decode": [self.decode]}
            for server in turn[turns]:
                server.scheduler.step()
            for server in self.servers:
                if server.errors:
                    raise server.errors[0]

    def answer(self, reqs: list[Req]) -> list[list[int]]:
        for req in reqs:
            self.add(req)
        self.until(lambda: not self.decode_side.has_work())
        return [req.output_ids for req in reqs]

    def links(self) -> list[Any]:
        """The transports of both ends that have the connections."""
        ends = [*self.sides, *self.decode_side.transfers.values()]
        ends = [end.transport for end in ends] + [*self.decode_side.prefill_engines.transports()]
        return [getattr(end, "real", end) for end in dict.fromkeys(ends)]

    def finish(self) -> None:
        """Run all until nothing is left. Then their pools are whole, and no transport keeps anything."""
        self.gate.set()
        links = self.links()
        self.until(lambda: not self.decode_side.has_work())
        self.until(lambda: not any(side.prefill or side.in_flight for side in self.sides), "prefill")
        for server in self.servers:
            server.check_whole()
        for link in links:
            assert not link._rooms
            assert not getattr(link, "_contents", None)


@contextlib.contextmanager
def cluster_of(config: EngineConfig, sizes: tuple[int, ...], folder: Path) -> Iterator[Cluster]:
    cluster: Cluster | None = None

    def gated(transport: Transport, frame: Frame, payload: bytes = b"") -> None:
        if frame.kind == "pages" and cluster is not None:
            cluster.is_copying.set()
            cluster.gate.wait(SECONDS)
        put(transport, frame, payload)

    put = Transport._put_frame
    with mock.patch.object(Transport, "_put_frame", gated):
        try:
            cluster = Cluster(config, sizes, folder / "secret")
            yield cluster
        finally:
            if cluster is not None:
                cluster.gate.set()
                for server in reversed(cluster.servers):
                    server.close()


def until_ready(url: str, status: int = 200) -> None:
    end = time.monotonic() + 60
    while (answer := httpx.get(f"{url}/ready", timeout=10)).status_code != status:
        assert time.monotonic() < end, answer.text
        time.sleep(0.05)


def free_port() -> int:
    """A port that no process is given unasked: those are from 32768 on."""
    dice = random.SystemRandom()  # processes of tests have one seed
    while True:
        with contextlib.suppress(OSError), socket.socket() as taken:
            taken.bind(("127.0.0.1", dice.randrange(20_000, 32_000)))
            port: int = taken.getsockname()[1]
            return port


@contextlib.contextmanager
def servers_of(ranks: tuple[int, int], *flags: str) -> Iterator[tuple[RunningServer, RunningServer]]:
    """A prefill server and a decode server, which is ready, of so many ranks."""
    port = free_port()
    modes = ("prefill", "--disaggregation-port"), ("decode", "--prefill-servers")
    values = (str(port), f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:

        def start(num_ranks: int, mode: tuple[str, str], value: str) -> RunningServer:
            more = ("--tp", str(num_ranks), "--disaggregation-mode", *mode, value)
            return stack.enter_context(serving(*flags, *more, own_interpreter=True))

        prefill, decode = threads.map(start, ranks, modes, values)
        until_ready(decode.url)
        yield prefill, decode
