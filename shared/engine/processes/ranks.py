"""Runs several ranks in step: rank 0 takes the calls and sends them to the others.

Rank 0 starts the other ranks, or a launcher such as torchrun has started all of them (`launcher.py`).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.build.settings import default_device, default_panel
from diptych.shared.engine.processes.child import (
    REPORT_SECONDS,
    Child,
    EngineProcessEnded,
    Inbox,
    describe_all,
    readable,
    reported_end,
    signal_of,
    started,
)
from diptych.shared.engine.processes.child_messages import Ready
from diptych.shared.engine.processes.devices import config_of_rank
from diptych.shared.engine.processes.input_log import Call, CallClock, Method, apply, encode, request_of
from diptych.shared.engine.processes.split_engine import split_side
from diptych.shared.engine.processes.watchdog import LIMIT, Watchdog
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import Collectives, Scheduler, SchedulerState, SchedulerStats
from diptych.shared.parallel.channel import Channel
from diptych.shared.parallel.collective_log import entries_of
from diptych.shared.parallel.grid import groups_of, join_ranks
from diptych.shared.parallel.meeting import local_store, open_store
from diptych.shared.types import Req, StepOutput

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
Wrap = Callable[[Assembly, Collectives], Assembly]


def assemble_ranks(config: EngineConfig, time_limit: float | None = None) -> Assembly:
    """Start the other ranks and return the engine of `config`, whose scheduler keeps the ranks in step.
    Raises `ValueError` as `assemble` does, and `EngineProcessEnded` if a rank cannot start."""
    time_limit = time_limit or config.dist_timeout
    configs = [config_of_rank(config, rank, config.num_ranks) for rank in range(config.num_ranks)]
    store = local_store(config.num_ranks)
    followers = [
        Child.spawn(f"rank {rank}", _follow_parent, configs[rank], rank, store.path, time_limit)
        for rank in range(1, config.num_ranks)
    ]
    return assemble_lead(configs[0], store, followers, time_limit)


def assemble_lead(
    config: EngineConfig,
    store: Store,
    followers: Sequence[Child],
    time_limit: float,
    rank: int = 0,
    wrap: Wrap | None = None,
) -> Assembly:
    """The engine on rank 0, or on the first rank of a replica, after the other ranks have been started.
    `config`: with this rank's device. `wrap`: changes the assembly of each rank."""
    with started(followers):
        for follower in followers:
            follower.next_message(time_limit)  # ready: the group would wait long for a missing rank
        tp = join_ranks(collectives_of(config), config, store, rank, time_limit)
        clock = CallClock()
        assembly = assemble(config, clock, tp=tp)
        assembly = wrap(assembly, tp) if wrap else assembly
        for follower in followers:
            follower.next_message(time_limit)
    lead = LeadScheduler(
        assembly.scheduler, assembly.grammars, followers, clock, tp, max(LIMIT, 2.5 * time_limit)
    )
    # Its arguments keep the other ranks alive until the call, also where all of this is garbage.
    weakref.finalize(lead, finish_launched, str(config.device), lead.watchdog, followers)
    return replace(assembly, scheduler=lead)


def finish_launched(device: str, watchdog: Watchdog, followers: Sequence[Child]) -> None:
    """Wait for what this rank has launched, before the other ranks are ended: on a GPU it may need them, and
    would never end without them."""
    if device.startswith("cuda") and not have_ended(followers):
        with watchdog.working():  # ends this process if a rank ends meanwhile
            torch.cuda.synchronize(device)


def collectives_of(config: EngineConfig) -> type[Collectives]:
    """The collectives that the configuration chooses."""
    panel = config.panel or default_panel(config.device or default_device())
    choice = registry.select(panel, config.use)["collectives"]
    chosen: type[Collectives] = registry.load("collectives", choice)
    return chosen


class LeadScheduler(Scheduler):
    """The scheduler of rank 0: each call is sent to the other ranks, then made here."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        followers: Sequence[Child],
        clock: CallClock,
        tp: Collectives,
        step_limit: float = LIMIT,
    ) -> None:
        self.scheduler = scheduler
        self.grammars = grammars
        self.followers = followers
        self.clock = clock
        self.tp = tp
        self.watchdog = Watchdog(  # without a reference to this object: so it is freed after its last use
            partial(describe_ranks, followers, tp),
            limit=step_limit,
            has_ended=partial(have_ended, followers),
        )
        self.survivors = getattr(scheduler, "survivors", None)
        if self.survivors is not None:
            self.survivors.is_torn = partial(have_ended, followers)

    def add_request(self, req: Req) -> None:
        if req.logit_processor is not None:
            raise ValueError(
                "custom logit processors do not work with tp > 1 or pp > 1: they exist on rank 0 only"
            )
        if req.sampling_params.stop_regex:
            raise ValueError(
                "stop_regex does not work with tp > 1 or pp > 1: its time limit may end a request on one rank"
            )
        self._tell("add_request", req=req)
        self.scheduler.add_request(req)

    def abort(self, rid: str) -> bool:
        if self.problem is None:
            self._tell("abort", rid)
        return self.scheduler.abort(rid)

    def retract(self, rid: str) -> bool:
        self._tell("retract", rid)
        return self.scheduler.retract(rid)

    def step(self) -> list[StepOutput]:
        """Raises `EngineProcessEnded`, now and in every later call, if another rank has ended."""
        self._tell("step")
        try:
            with self.watchdog.working():
                return self.scheduler.step()
        finally:
            self._check()  # an error here may follow from the end of another rank

    def flush_cache(self) -> bool:
        self._tell("flush_cache")
        return self.scheduler.flush_cache()

    def forget_kv(self) -> list[StepOutput]:
        self._tell("forget_kv")
        return self.scheduler.forget_kv()

    def run(self, function: Callable[..., T], engine: object, *arguments: Any) -> T:
        """`function(engine, *arguments)` on every rank; the result of rank 0. On the other ranks the engine
        is the assembly. `function`: of a module. `arguments`: what MessagePack has."""
        name = f"{function.__module__}:{function.__qualname__}"
        self._tell("run", function=name, arguments=list(arguments))
        try:
            return function(engine, *arguments)
        finally:
            self._check()

    def surround(self, side: Scheduler) -> None:
        """From now on `side` has the calls: that of a split server, around the scheduler. Every other rank
        makes its own."""
        self._tell("split")
        self.scheduler = side

    def hear(self, call: Call) -> None:
        """Which replicas are left, also while a step runs. The other ranks regroup when this one does."""
        for follower in self.followers:
            follower.call(encode(Call("hear", call.now, arguments=call.arguments)))
        self.scheduler.hear(call)  # type: ignore[attr-defined]

    def regroup(self) -> None:
        """Between two steps: go on with the replicas that are left."""
        self._tell("regroup")
        try:
            self.scheduler.regroup()  # type: ignore[attr-defined]
        finally:
            self._check()

    def has_work(self) -> bool:
        """True also if a rank has ended, so that `step` is called and raises."""
        return self.scheduler.has_work() or self.has_ended()

    def has_ended(self) -> bool:
        """Whether another rank has ended."""
        return self.problem is not None or have_ended(self.followers)

    def state(self) -> SchedulerState:
        return self.scheduler.state()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def _tell(self, method: Method, rid: str = "", req: Req | None = None, **more: Any) -> None:
        if self.problem is not None:
            raise EngineProcessEnded(self.problem)
        self.clock.now = time.monotonic()
        request = request_of(req, self.grammars) if req is not None else None
        data = encode(Call(method, self.clock.now, rid, request, **more))
        for follower in self.followers:
            follower.call(data)
        self._check()

    def _check(self) -> None:
        """Raise `EngineProcessEnded` if another rank has ended or has stopped following."""
        is_broken = has_failed(self.tp)
        ended = readable(self.followers, REPORT_SECONDS if is_broken else 0)  # else they send nothing
        if not ended and not is_broken:
            return
        found = describe_ranks(self.followers, self.tp)
        problem = min(ended or self.followers, key=signal_of).describe_end()  # killed before those it ends
        print(f"{problem}\n{found}", file=sys.stderr, flush=True)
        self.end(problem)
        raise EngineProcessEnded(problem)

    def end(self, problem: str) -> None:
        """End the other ranks. Every later call raises `EngineProcessEnded`."""
        self.problem = problem
        for follower in self.followers:
            follower.end()


def have_ended(followers: Sequence[Child]) -> bool:
    return bool(readable(followers, 0))  # running ranks send nothing


def describe_ranks(followers: Sequence[Child], tp: Collectives) -> str:
    return describe_all(followers, entries_of(groups_of(tp)))


def has_failed(tp: Collectives) -> bool:
    """Whether a collective of one of the groups has failed."""
    return any(group.is_broken for group in groups_of(tp))


def _follow_parent(config: EngineConfig, rank: int, path: str, time_limit: float, pipe: Channel) -> None:
    """The main function of another rank's process."""
    follow(config, rank, lambda: open_store(path, config.num_ranks), time_limit, pipe)


def follow(
    config: EngineConfig,
    rank: int,
    connect: Any,
    time_limit: float,
    pipe: Channel,
    wrap: Wrap | None = None,
) -> None:
    """Repeat the calls of rank 0 until it ends, then end this process. `config`: with this rank's device.
    `connect` returns the store."""
    groups: Sequence[Collectives] = ()
    inbox = Inbox(pipe, lambda: entries_of(groups))
    with reported_end(inbox):
        store = connect()
        inbox.send(Ready())
        tp = join_ranks(collectives_of(config), config, store, rank, time_limit)
        groups = groups_of(tp)
        clock = CallClock()
        assembly = assemble(config, clock, tp=tp)
        assembly = wrap(assembly, tp) if wrap else assembly
        inbox.hear = getattr(assembly.scheduler, "hear", None)
        inbox.start()
        while True:
            for call in inbox.calls(is_busy=False):
                assembly = repeat(call, assembly, clock)
                if has_failed(tp):
                    raise RuntimeError("a collective has failed: another rank has ended, or is late")


def repeat(call: Call, assembly: Assembly, clock: CallClock) -> Assembly:
    """Make a call of rank 0 on another rank; returns the assembly of the next calls."""
    clock.follow(call)
    if call.method == "split":
        return replace(assembly, scheduler=split_side(assembly))
    apply(call, assembly.scheduler, assembly.grammars, assembly)
    return assembly
