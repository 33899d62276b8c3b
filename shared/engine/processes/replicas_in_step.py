"""Data-parallel attention: replicas that share the experts, and therefore step together.

The controller starts a step on all replicas while any has work. A replica without a batch takes part with an
IDLE batch (`diptych.shared.parallel.in_step`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.processes.child import (
    REPORT_SECONDS,
    Child,
    EngineProcessEnded,
    Inbox,
    readable,
    reported_end,
    started,
)
from diptych.shared.engine.processes.child_messages import Ready
from diptych.shared.engine.processes.devices import config_in_step, config_of_rank
from diptych.shared.engine.processes.input_log import Call, encode
from diptych.shared.engine.processes.ranks import (
    LeadScheduler,
    assemble_lead,
    collectives_of,
    describe_ranks,
    finish_launched,
    follow,
    have_ended,
)
from diptych.shared.engine.processes.replicas import START_SECONDS, Controller, controlled, serve_calls
from diptych.shared.engine.processes.watchdog import LIMIT, Watchdog
from diptych.shared.interfaces import Collectives, Scheduler, SchedulerState, SchedulerStats
from diptych.shared.parallel.channel import Channel
from diptych.shared.parallel.grid import join_ranks
from diptych.shared.parallel.meeting import local_store, open_store
from diptych.shared.parallel.survivors import Members, Survivors
from diptych.shared.types import Req, StepOutput


class ScheduleInStep(Scheduler):
    """The scheduler of one replica. Each step has exactly one forward pass, of an IDLE batch if there is no
    other."""

    def __init__(self, scheduler: Scheduler, runner: Any, dp: Collectives) -> None:
        """runner: made by `in_lockstep`."""
        self.scheduler = scheduler
        self.runner = runner
        self.dp = dp

    def step(self) -> list[StepOutput]:
        """Raises `EngineProcessEnded` if the replicas are out of step."""
        # --8<-- [start:step-in-step]
        num_before = self.runner.num_passes
        outputs = self.scheduler.step() if self.scheduler.has_work() else []
        if self.runner.num_passes == num_before:
            self.runner.run_idle_pass(self.scheduler)
        # --8<-- [end:step-in-step]
        if self.dp.is_broken or not self.runner.is_in_step or self.runner.num_passes != num_before + 1:
            raise EngineProcessEnded("the replicas are not in step: one has ended, has failed, or is late")
        return outputs

    @property
    def survivors(self) -> Survivors | None:
        found: Survivors | None = self.runner.in_step.survivors
        return found

    def hear(self, call: Call) -> None:
        """Who is left, also while a step runs."""
        assert self.survivors is not None
        self.survivors.hear(Members(*call.arguments))

    def regroup(self) -> None:
        """Between two steps: go on with those who are left."""
        self.runner.regroup()

    def add_request(self, req: Req) -> None:
        self.scheduler.add_request(req)

    def abort(self, rid: str) -> bool:
        return self.scheduler.abort(rid)

    def retract(self, rid: str) -> bool:
        return self.scheduler.retract(rid)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def flush_cache(self) -> bool:
        return self.scheduler.flush_cache()

    def state(self) -> SchedulerState:
        return self.scheduler.state()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()


class ControllerInStep(Controller):
    """A controller whose replicas step together. If one ends, all end, or with `elastic_ep` its requests."""

    steps_when_called = True

    def __init__(self, config: EngineConfig, scheduler: Any, *of_controller: Any) -> None:
        """scheduler: the `ScheduleInStep` of the first replica."""
        super().__init__(config, scheduler, *of_controller)
        self.dp: Collectives = scheduler.tp if isinstance(scheduler, LeadScheduler) else scheduler.dp
        self.survivors = getattr(scheduler, "survivors", None)
        self._stores: list[Any] = []  # in which replicas may still meet
        others = self.replicas[1:]
        self.watchdog = Watchdog(  # without a reference to this object: so it is freed after its last use
            partial(describe_ranks, others, self.dp),
            limit=max(LIMIT, 2.5 * config.dist_timeout),
            has_ended=partial(_have_ended, self.replicas, self.lost),
        )
        # Its arguments keep the other replicas alive until the call, also where all of this is garbage.
        weakref.finalize(self, finish_launched, str(config.device), self.watchdog, others)

    def step(self) -> list[StepOutput]:
        if self.problem is not None:
            raise EngineProcessEnded(self.problem)
        outputs: list[StepOutput] = []
        with self.watchdog.working():
            for replica in range(len(self.replicas)):
                if replica not in self.lost:
                    self.call(replica, "step")
            waiting = self.working
            while waiting:  # the first to answer is the one that has ended, not one that misses it
                for ready in readable(waiting, REPORT_SECONDS):
                    outputs += self.receive(ready)
                    waiting.remove(ready)
        return self.counted(outputs)

    # --8<-- [start:lose-a-replica]
    def lose(self, replica: int, problem: str) -> list[StepOutput]:
        """With `elastic_ep` the others go on, if they have room for all experts."""
        if self.survivors is None or replica == 0:
            raise self.ended(problem)
        left = [number for number in range(len(self.replicas)) if number not in {*self.lost, replica}]
        if len(left) < self.survivors.least_replicas:
            raise self.ended(f"{problem}; replicas {left} have no room for all experts")
        outputs = super().lose(replica, problem)
        self._stores.append(local_store(len(left) * self.config.tp))
        members = Members(len(self._stores), left, self._stores[-1].path)
        for number in left:
            self.replicas[number].call(encode(Call("regroup", time.monotonic(), arguments=list(members))))
        return outputs

    # --8<-- [end:lose-a-replica]


def _have_ended(replicas: Sequence[Child], lost: Collection[int]) -> bool:
    """Whether another replica has ended, and the controller does not go on without it."""
    return have_ended([other for number, other in enumerate(replicas) if number > 0 and number not in lost])


def assemble_in_step(config: EngineConfig, time_limit: float | None = None) -> Assembly:
    """Start config.dp replicas and return the engine of `config`. Raises `ValueError` as `assemble` does, and
    `EngineProcessEnded` if a replica cannot start."""
    time_limit = time_limit or config.dist_timeout
    store = local_store(config.dp * config.tp)
    configs = [config_in_step(config, i) for i in range(config.dp)]
    others = [
        Child.spawn(f"replica {i}", _run_replica, configs[i], i, store.path, time_limit)
        for i in range(1, config.dp)
    ]
    with started(others):
        for other in others:
            other.next_message(time_limit)
        assembly = assemble_replica(configs[0], store, 0, time_limit)
        pool_sizes = [other.next_message(START_SECONDS) for other in others]
    return replace(
        assembly, scheduler=controlled(ControllerInStep, assembly.config, assembly, others, pool_sizes)
    )


def assemble_replica(config: EngineConfig, store: Any, replica: int, time_limit: float) -> Assembly:
    """Assemble one replica, and start its other ranks, which repeat the calls of the first."""
    first = replica * config.tp
    if config.tp > 1:
        followers = [
            Child.spawn(
                f"rank {part} of replica {replica}", _follow_replica,
                config_of_rank(config, part, config.tp), first + part, store.path, time_limit,
            )
            for part in range(1, config.tp)
        ]  # fmt: skip
        return assemble_lead(config, store, followers, time_limit, first, wrap=in_step)
    dp = join_ranks(collectives_of(config), config, store, first, time_limit)
    return in_step(assemble(config, time.monotonic, tp=dp), dp)


def in_step(assembly: Assembly, ranks: Collectives) -> Assembly:
    """The same on one rank of a replica, with one pass in each step."""
    scheduler = ScheduleInStep(assembly.scheduler, assembly.parts.model_runner, ranks)
    return replace(assembly, scheduler=scheduler)


def _follow_replica(config: EngineConfig, rank: int, path: str, time_limit: float, pipe: Channel) -> None:
    """The main function of another rank of a replica."""
    follow(config, rank, lambda: open_store(path, config.dp * config.tp), time_limit, pipe, wrap=in_step)


def _run_replica(config: EngineConfig, rank: int, path: str, time_limit: float, pipe: Channel) -> None:
    """The main function of another replica's process."""
    log: Any = []
    inbox = Inbox(pipe, lambda: list(log.copy()))
    with reported_end(inbox):
        store = open_store(path, config.dp * config.tp)
        inbox.send(Ready())
        assembly = assemble_replica(config, store, rank, time_limit)
        scheduler: Any = assembly.scheduler
        log = (scheduler.tp if config.tp > 1 else scheduler.dp).log.entries
        inbox.start(assembly.parts.allocator.size)
        serve_calls(scheduler, assembly.grammars, inbox, steps_when_called=True)
