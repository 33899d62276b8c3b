"""Data parallelism: replicas of the whole model, and a controller that gives each request to one of them.

The first replica works in this process, the others in processes of their own. Each may have several ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from shared.config import EngineConfig
from shared.engine.assembly import Assembly, default_device
from shared.engine.child import Child, EngineProcessEnded, Inbox, Report, reported_end, started
from shared.engine.input_log import Call, Method, apply, encode, request_of
from shared.engine.ranks import LeadScheduler
from shared.interfaces import Scheduler, SchedulerState, SchedulerStats
from shared.scheduling.admission import admit
from shared.types import Req, SpeculationStats, StepOutput

START_SECONDS = 1800.0
"""Until a replica must be ready: it reads its weights."""
POLL_SECONDS = 0.005
"""That a step waits for outputs of the other replicas when this process has no work."""


@dataclass
class Load:
    """What a replica has to do, as the controller knows it. A request counts from `add_request` to the output
    that ends it, so a burst of requests counts at once, before any report."""

    num_tokens: dict[str, int] = field(default_factory=dict)  # of each live request, prompt and output


@dataclass(frozen=True)
class StepReport:
    """What a replica sends after a step."""

    outputs: list[StepOutput]
    stats: SchedulerStats
    start_times: dict[str, tuple[float, float | None]]  # of requests that are new: arrival, first step


# --8<-- [start:choose-replica]
def choose_replica(policy: str, loads: Sequence[Load], last: int) -> int:
    """The replica for the next request, `last` being that of the previous one. Ties go
    round robin: else the first replica would get every request that comes when all are
    idle."""
    in_turn = [(last + 1 + i) % len(loads) for i in range(len(loads))]
    if policy == "round-robin":
        return in_turn[0]
    if policy == "least-requests":
        return min(in_turn, key=lambda i: len(loads[i].num_tokens))
    return min(in_turn, key=lambda i: (sum(loads[i].num_tokens.values()), len(loads[i].num_tokens)))


# --8<-- [end:choose-replica]


class Controller(Scheduler):
    """The scheduler of all replicas. A step is one of the first replica, and gives what has come from the
    others meanwhile. The end of a replica is the end of all."""

    def __init__(
        self, config: EngineConfig, assembly: Assembly, others: Sequence[Child], pool_sizes: Sequence[int]
    ) -> None:
        self.policy = config.dp_policy
        self.assembly = assembly
        self.scheduler = assembly.scheduler
        self.others = others
        self.pool_size = min(assembly.parts.allocator.size, *pool_sizes)
        self.loads = [Load() for _ in range(1 + len(others))]
        self.replica_of: dict[str, int] = {}  # by rid, of live requests
        self.problem: str | None = None  # why the engine cannot go on
        self._reqs: dict[str, Req] = {}  # of other replicas, until their first output
        self._last = -1
        self._stats = [self.scheduler.stats()._replace(new_token_ratio=0.0) for _ in self.others]

    def add_request(self, req: Req) -> None:
        if req.logit_processor is not None:
            raise ValueError("dp > 1 has no custom logit processors: they exist in one process only")
        if req.rid in self.replica_of:
            raise ValueError(f"request id {req.rid!r} is in use")
        context_len = self.assembly.config.context_len
        assert context_len is not None
        admit(req, self.assembly.model_config.vocab_size, context_len, self.pool_size)
        chosen = choose_replica(self.policy, self.loads, self._last)
        self.call(chosen, "add_request", req.rid, req)
        self._last = chosen
        self.replica_of[req.rid] = chosen
        self.loads[chosen].num_tokens[req.rid] = len(req.origin_input_ids)
        if chosen > 0:
            self._reqs[req.rid] = req

    def abort(self, rid: str) -> bool:
        return self._call_home("abort", rid)

    def retract(self, rid: str) -> bool:
        return self._call_home("retract", rid)

    def step(self) -> list[StepOutput]:
        """Raises `EngineProcessEnded` when a replica has ended; it does so in every later call."""
        if self.problem is not None:
            raise EngineProcessEnded(self.problem)
        is_busy = self.scheduler.has_work()
        outputs = self.first(self.scheduler.step) if is_busy else []
        others: dict[Any, Child] = {other.pipe: other for other in self.others}
        ready = wait(list(others), 0 if is_busy else POLL_SECONDS)
        while ready:  # several steps, if they are shorter than the first replica's
            for pipe in ready:
                outputs += self.receive(others[pipe])
            ready = wait(list(others), 0)
        return self.counted(outputs)

    def counted(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """The same, with the loads as they are now."""
        for output in outputs:
            load = self.loads[self.replica_of[output.rid]]
            load.num_tokens[output.rid] += len(output.new_token_ids)
            if output.finished_reason is not None:
                del load.num_tokens[output.rid], self.replica_of[output.rid]
                self._reqs.pop(output.rid, None)
        return outputs

    def has_work(self) -> bool:
        """Also when a replica has ended: then `step` raises."""
        if self.replica_of or self.problem is not None or self.scheduler.has_work():
            return True
        return bool(wait([other.pipe for other in self.others], 0))

    def flush_cache(self) -> bool:
        if self.replica_of or not self.scheduler.flush_cache():
            return False
        for replica in range(1, len(self.loads)):
            self.call(replica, "flush_cache")
        return True

    def state(self) -> SchedulerState:
        """Of the first replica."""
        return self.scheduler.state()

    def stats(self) -> SchedulerStats:
        """Sums over replicas; new_token_ratio is that of the first."""
        each = [self.scheduler.stats(), *self._stats]
        sums: dict[str, Any] = {
            name: sum(getattr(stats, name) for stats in each)
            for name in SchedulerStats._fields
            if name not in ("speculation", "new_token_ratio")
        }
        speculation = SpeculationStats(*map(sum, zip(*(stats.speculation for stats in each))))
        return each[0]._replace(**sums, speculation=speculation)

    def _call_home(self, method: Method, rid: str) -> bool:
        replica = self.replica_of.get(rid)
        if replica is None:
            return False
        return self.call(replica, method, rid)

    def call(self, replica: int, method: Method, rid: str = "", req: Req | None = None) -> bool:
        """True: the first replica did it, or it is sent to another."""
        if replica > 0:
            request = request_of(req, self.assembly.grammars) if req is not None else None
            self.others[replica - 1].call(encode(Call(method, time.monotonic(), rid, request)))
            return True
        if req is not None:
            self.first(self.scheduler.add_request, req)
            return True
        return bool(self.first(getattr(self.scheduler, method), rid))

    def first(self, method: Callable[..., Any], *args: object) -> Any:
        """A call of the first replica, of which a rank may have ended."""
        try:
            return method(*args)
        except EngineProcessEnded as error:
            raise self.ended(str(error)) from None

    def receive(self, other: Child) -> list[StepOutput]:
        """The outputs of a replica's step. Raises `EngineProcessEnded` if it has ended."""
        try:
            report = other.pipe.recv()
        except (EOFError, OSError):
            report = None
        if isinstance(report, StepReport):
            self._stats[self.others.index(other)] = report.stats
            for rid, (arrival_time, run_start_time) in report.start_times.items():
                req = self._reqs.pop(rid, None)
                if req is not None:
                    req.arrival_time, req.run_start_time = arrival_time, run_start_time
            return report.outputs
        problem = other.describe_end()
        raise self.ended(f"{problem}: {report.error}" if isinstance(report, Report) else problem)

    def ended(self, problem: str) -> EngineProcessEnded:
        """No replica goes on without the others."""
        self.problem = problem
        for other in self.others:
            other.end()
        if isinstance(self.scheduler, LeadScheduler):
            self.scheduler.end(problem)
        return EngineProcessEnded(problem)


def assemble_replicas(config: EngineConfig) -> Assembly:
    """The engine of `config`, with config.dp replicas. Raises `ValueError` as `assemble` does, and
    `EngineProcessEnded` when a replica cannot start."""
    from shared.engine.start import start_engine

    others = [
        Child.spawn(f"replica {i}", _run_replica, config_of_replica(config, i)) for i in range(1, config.dp)
    ]
    with started(others):
        assembly = start_engine(config_of_replica(config, 0))
        pool_sizes = [other.next_message(START_SECONDS) for other in others]
    controller = Controller(config, assembly, others, pool_sizes)
    return replace(
        assembly, config=assembly.config.updated(dp=config.dp, device=config.device), scheduler=controller
    )


def config_of_replica(config: EngineConfig, replica: int) -> EngineConfig:
    """Its own GPU, where the device is one. Raises `ValueError` where there are too few."""
    device = config.device or default_device()
    if device.startswith("cuda"):
        import torch

        if device != "cuda" or config.dp > torch.cuda.device_count():
            raise ValueError(
                f"dp={config.dp} on device={device}: each replica has a GPU of its own, cuda:0 to "
                f"cuda:{config.dp - 1}; this computer has {torch.cuda.device_count()}"
            )
        device = f"cuda:{replica}"
    return config.updated(dp=1, device=device)


def _run_replica(config: EngineConfig, pipe: Connection) -> None:
    """The process of another replica."""
    from shared.engine.start import start_engine

    inbox = Inbox(pipe, list)
    with reported_end(inbox):
        assembly = start_engine(config)
        inbox.start(assembly.parts.allocator.size)
        serve_calls(assembly, inbox)


def serve_calls(assembly: Assembly, inbox: Inbox, steps_when_called: bool = False) -> None:
    """Make the calls of the controller, and steps while there is work, or when the controller says so."""
    scheduler = assembly.scheduler
    new: dict[str, Req] = {}
    while True:
        is_called = False
        for call in inbox.calls(is_busy=scheduler.has_work() and not steps_when_called):
            if call.method == "step":
                is_called = True  # the last call that has come: the controller waits for its report
                continue
            req = apply(call, scheduler, assembly)
            if req is not None:
                new[req.rid] = req
        if is_called or (scheduler.has_work() and not steps_when_called):
            outputs = scheduler.step()
            started = [new.pop(output.rid) for output in outputs if output.rid in new]
            times = {req.rid: (req.arrival_time, req.run_start_time) for req in started}
            inbox.send(StepReport(outputs, scheduler.stats(), times))
