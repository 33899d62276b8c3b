"""Tensor parallelism on one machine: rank 0 in this process, the others in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from shared import registry
from shared.config import EngineConfig
from shared.engine.assembly import Assembly, assemble, default_device, default_panel
from shared.engine.input_log import Call, CallClock, Method, Request, decode, encode
from shared.interfaces import Collectives, Scheduler, SchedulerState, SchedulerStats
from shared.types import Req, StepOutput

TIME_LIMIT = 120.0
"""Seconds that a rank waits for the others: in a collective, and when they start."""


END_SECONDS = 5.0
"""That a rank takes to end after its connections are closed."""


class RankEnded(RuntimeError):
    """A rank has ended, so no rank can go on. The engine cannot be used any more."""


def assemble_ranks(config: EngineConfig, time_limit: float = TIME_LIMIT) -> Assembly:
    """The engine of `config`, with the other ranks started; the assembly's scheduler keeps them in step.
    Raises `ValueError` as `assemble` does, and `RankEnded` when a rank cannot start."""
    from torch.distributed import TCPStore

    followers: list[Follower] = []
    store = TCPStore("127.0.0.1", 0, config.tp, True, wait_for_workers=False)
    try:
        for rank in range(1, config.tp):
            followers.append(Follower(config, rank, store.port, time_limit))
        tp = collectives_of(config)(store, 0, config.tp, time_limit)
        clock = CallClock()
        assembly = assemble(config, clock, tp=tp)
        for follower in followers:
            follower.wait_until_ready(time_limit)
    except BaseException as error:
        for follower in followers:
            follower.kill()
        if isinstance(error, RuntimeError) and not isinstance(error, RankEnded):
            raise RankEnded(f"the ranks do not find each other: {error}") from error
        raise
    return replace(assembly, scheduler=LeadScheduler(assembly.scheduler, followers, clock, tp))


def collectives_of(config: EngineConfig) -> type[Collectives]:
    """The implementation that the configuration chooses."""
    panel = config.panel or default_panel(config.device or default_device())
    chosen: type[Collectives] = registry.load(
        "collectives", registry.select(panel, config.use)["collectives"]
    )
    return chosen


class Follower:
    """A process with another rank."""

    def __init__(self, config: EngineConfig, rank: int, port: int, time_limit: float) -> None:
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.rank = rank
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=_follow, args=(config, rank, port, time_limit, theirs), name=f"rank-{rank}", daemon=True
        )
        self.process.start()
        theirs.close()

    def wait_until_ready(self, time_limit: float) -> None:
        """Raises `RankEnded` when the rank cannot start."""
        try:
            if self.pipe.poll(time_limit):
                self.pipe.recv_bytes()
                return
        except EOFError:
            self.process.join()
        raise RankEnded(self.describe_end())

    def describe_end(self) -> str:
        """How the rank ended, for people."""
        code = self.process.exitcode
        if code is None:
            return f"rank {self.rank} does not answer"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"rank {self.rank} has ended with {how}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class LeadScheduler(Scheduler):
    """The scheduler of rank 0: each call is sent to the other ranks, then made here."""

    def __init__(
        self, scheduler: Scheduler, followers: Sequence[Follower], clock: CallClock, tp: Collectives
    ) -> None:
        self.scheduler = scheduler
        self.followers = followers
        self.clock = clock
        self.tp = tp
        self.problem: str | None = None  # why the engine cannot go on

    def add_request(self, req: Req) -> None:
        if req.logit_processor is not None:
            raise ValueError("tp > 1 has no custom logit processors: they exist on one rank only")
        request = Request(
            req.rid,
            req.origin_input_ids,
            req.sampling_params,
            req.seed,
            sorted(req.eos_token_ids),
            req.extra_key,
            req.priority,
            req.routing_key,
            req.grammar is not None,
        )
        self._tell("add_request", request=request)
        self.scheduler.add_request(req)

    def abort(self, rid: str) -> bool:
        if self.problem is None:
            self._tell("abort", rid=rid)
        return self.scheduler.abort(rid)

    def retract(self, rid: str) -> bool:
        self._tell("retract", rid=rid)
        return self.scheduler.retract(rid)

    def step(self) -> list[StepOutput]:
        """Raises `RankEnded` when another rank has ended; it does so in every later call."""
        self._tell("step")
        outputs = self.scheduler.step()
        self._check()
        return outputs

    def flush_cache(self) -> bool:
        self._tell("flush_cache")
        return self.scheduler.flush_cache()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def state(self) -> SchedulerState:
        return self.scheduler.state()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def _tell(self, method: Method, rid: str = "", request: Request | None = None) -> None:
        if self.problem is not None:
            raise RankEnded(self.problem)
        self.clock.now = time.monotonic()
        try:
            data = encode(Call(method, self.clock.now, rid, request))
        except OverflowError:
            raise ValueError("tp > 1: an integer of the request exceeds 64 bits") from None
        with contextlib.suppress(OSError):  # found by _check
            for follower in self.followers:
                follower.pipe.send_bytes(data)
        self._check()

    def _check(self) -> None:
        """Raise `RankEnded` if another rank has ended, or does not take part any more."""
        # A rank that ends closes its connections first.
        sentinels = [follower.process.sentinel for follower in self.followers]
        ready = wait(sentinels, END_SECONDS if self.tp.is_broken else 0)
        ended = [follower for follower in self.followers if follower.process.sentinel in ready]
        for follower in ended:
            follower.process.join(END_SECONDS)
        if ended or self.tp.is_broken:
            self.problem = (ended or self.followers)[0].describe_end()
            for each in self.followers:
                each.kill()
            raise RankEnded(self.problem)


def _follow(config: EngineConfig, rank: int, port: int, time_limit: float, pipe: Connection) -> None:
    """The process of another rank: it ends with rank 0, whose end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    from torch.distributed import TCPStore

    code, is_ready = 0, False
    try:
        store = TCPStore("127.0.0.1", port, config.tp, False)
        tp = collectives_of(config)(store, rank, config.tp, time_limit)
        clock = CallClock()
        assembly = assemble(config, clock, tp=tp)
        pipe.send_bytes(b"ready")
        is_ready = True
        while True:
            call = decode(pipe.recv_bytes())
            clock.now = call.now
            _apply(call, assembly)
    except EOFError:
        pass
    except BaseException as error:
        code = 1
        if is_ready or not isinstance(error, ValueError):  # a bad configuration, rank 0 reports
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no library may keep a rank alive


def _apply(call: Call, assembly: Assembly) -> None:
    scheduler: Any = assembly.scheduler
    if call.method == "add_request":
        assert call.request is not None
        req = _req(call.request, assembly)  # its grammar compiled on rank 0: here an error ends all ranks
        with contextlib.suppress(ValueError):  # rank 0 refuses it too
            scheduler.add_request(req)
    elif call.method in ("abort", "retract"):
        getattr(scheduler, call.method)(call.rid)
    else:
        getattr(scheduler, call.method)()


def _req(request: Request, assembly: Assembly) -> Req:
    req = Req(
        rid=request.rid,
        origin_input_ids=request.input_ids,
        sampling_params=request.params,
        seed=request.seed,
        eos_token_ids=frozenset(request.eos_token_ids),
        extra_key=request.extra_key,
        priority=request.priority,
        routing_key=request.routing_key,
    )
    if request.has_grammar:
        compiled = assembly.grammars.submit(request.params)
        assert compiled is not None
        req.grammar = assembly.grammars.grammar_for(req, compiled.result())
    return req
