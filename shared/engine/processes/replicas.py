"""Data parallelism: replicas of the whole model, and a controller that assigns each request to a replica.

The first replica works in a thread of this process, the others in processes of their own. The controller
sends calls to all of them and waits for none. Each replica may have several ranks.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.processes.child import (
    Child,
    EngineProcessEnded,
    Inbox,
    readable,
    reported_end,
    started,
)
from diptych.shared.engine.processes.child_messages import Report, StepReport, step_report
from diptych.shared.engine.processes.child_thread import ChildThread
from diptych.shared.engine.processes.devices import config_of_replica
from diptych.shared.engine.processes.input_log import Call, Method, apply, encode, req_of, request_of
from diptych.shared.engine.processes.ranks import LeadScheduler
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import Scheduler, SchedulerState, SchedulerStats
from diptych.shared.parallel.channel import Channel
from diptych.shared.scheduling.admission import admit
from diptych.shared.types import FinishAbort, FinishError, Req, SpeculationStats, StepOutput

Start = Callable[[EngineConfig], Assembly]
Lost = Collection[int]

START_SECONDS = 1800.0
"""Time limit in seconds for the start of a replica, which reads its weights."""
POLL_SECONDS = 0.005
"""Seconds that a step waits for outputs."""


@dataclass
class Load:
    """The controller's estimate of a replica's load. A request counts from `add_request` to the output that
    ends it, so a burst of requests counts before the replica reports it."""

    num_tokens: dict[str, int] = field(default_factory=dict)  # of each live request, prompt and output
    num_outputs: dict[str, int] = field(default_factory=dict)  # of these, output; from its first output on


# --8<-- [start:choose-replica]
def choose_replica(policy: str, loads: Sequence[Load], last: int, lost: Lost = ()) -> int:
    """The replica for the next request; `last` is that of the previous one, and `lost`
    have ended. Ties are broken round robin, otherwise the first replica would get every
    request that arrives while all are idle."""
    in_turn = [(last + 1 + i) % len(loads) for i in range(len(loads))]
    in_turn = [i for i in in_turn if i not in lost]
    if policy == "round-robin":
        return in_turn[0]
    if policy == "least-requests":
        return min(in_turn, key=lambda i: len(loads[i].num_tokens))
    return min(in_turn, key=lambda i: (sum(loads[i].num_tokens.values()), len(loads[i].num_tokens)))


# --8<-- [end:choose-replica]


class Controller(Scheduler):
    """The scheduler of all replicas. Its step returns the outputs that have come from them. If a replica
    ends, its requests end with an error, and the others go on."""

    steps_when_called = False
    """Whether a replica makes a step only when the controller calls for one."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        vocab_size: int,
        pool_size: int,
        replicas: Sequence[Child],
    ) -> None:
        """config: resolved. scheduler: of the first replica. pool_size: tokens of the smallest pool."""
        self.config = config
        self.scheduler = scheduler
        self.grammars = grammars
        self.vocab_size = vocab_size
        self.pool_size = pool_size
        self.replicas = replicas
        self.loads = [Load() for _ in replicas]
        self.replica_of: dict[str, int] = {}  # by rid, of live requests
        self._reqs: dict[str, Req] = {}  # until their first output
        self.lost: set[int] = set()  # replicas that have ended
        self._last = -1
        self._stats = [scheduler.stats() for _ in replicas]

    def add_request(self, req: Req) -> None:
        if req.logit_processor is not None:
            raise ValueError("dp > 1 has no custom logit processors: they exist in one process only")
        if req.rid in self.replica_of:
            raise ValueError(f"request id {req.rid!r} is in use")
        assert self.config.context_len is not None
        admit(req, self.vocab_size, self.config.context_len, self.pool_size)
        if self.problem is not None:
            raise EngineProcessEnded(self.problem)
        chosen = choose_replica(self.config.dp_policy, self.loads, self._last, self.lost)
        self.call(chosen, "add_request", req.rid, req)
        self._last = chosen
        self.replica_of[req.rid] = chosen
        self.loads[chosen].num_tokens[req.rid] = len(req.origin_input_ids)
        self._reqs[req.rid] = req

    def abort(self, rid: str) -> bool:
        return self._call_home("abort", rid)

    def retract(self, rid: str) -> bool:
        return self._call_home("retract", rid)

    def step(self) -> list[StepOutput]:
        """Raises `EngineProcessEnded`, now and in every later call, if all replicas have ended."""
        if self.problem is not None:
            raise EngineProcessEnded(self.problem)
        outputs: list[StepOutput] = []
        ready = readable(self.working, POLL_SECONDS)
        while ready:  # of several steps, if they are short
            for replica in ready:
                outputs += self.receive(replica)
            ready = readable(self.working, 0)
        return self.counted(outputs)

    def counted(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """The same outputs; updates the loads."""
        for output in outputs:
            load = self.loads[self.replica_of[output.rid]]
            load.num_tokens[output.rid] += len(output.new_token_ids)
            load.num_outputs[output.rid] = output.num_output_tokens
            if output.finished_reason is not None:
                del load.num_tokens[output.rid], load.num_outputs[output.rid], self.replica_of[output.rid]
                self._reqs.pop(output.rid, None)
        return outputs

    def has_work(self) -> bool:
        """True also if a replica has ended, so that `step` is called."""
        return bool(self.replica_of or self.problem is not None or readable(self.working, 0))

    def flush_cache(self) -> bool:
        if self.replica_of:
            return False
        for replica in range(len(self.replicas)):
            self.call(replica, "flush_cache")  # one that has ended does not mind
        self._stats = [stats._replace(num_used_tokens=0, num_evictable_tokens=0) for stats in self._stats]
        return True

    def state(self) -> SchedulerState:
        """The state of the first replica."""
        return self.scheduler.state()

    def stats(self) -> SchedulerStats:
        """Statistics of the latest reports, summed over replicas; new_token_ratio is that of the first."""
        each = list(self._stats)
        for replica in self.lost:
            each[replica] = each[replica]._replace(
                num_running=0, num_waiting=0, num_used_tokens=0, num_evictable_tokens=0
            )
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
        self.call(replica, method, rid)
        return True

    def call(self, replica: int, method: Method, rid: str = "", req: Req | None = None) -> None:
        """Send a call. If the replica has ended, the next step has the ends of its requests."""
        request = request_of(req, self.grammars) if req is not None else None
        self.replicas[replica].call(encode(Call(method, time.monotonic(), rid, request)))

    @property
    def working(self) -> list[Child]:
        """The replicas that have not ended."""
        return [replica for i, replica in enumerate(self.replicas) if i not in self.lost]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return len(self.replicas) - len(self.lost)

    def receive(self, replica: Child) -> list[StepOutput]:
        """The outputs of a replica's step, or the ends of its requests if it has ended."""
        number, report, outputs = self.replicas.index(replica), None, list[StepOutput]()
        with contextlib.suppress(EOFError, OSError):
            report = replica.receive()
            outputs = report.all_outputs() if isinstance(report, StepReport) else []
        if isinstance(report, StepReport):
            self._stats[number] = report.stats
            for rid, (arrival_time, run_start_time) in report.start_times.items():
                req = self._reqs.pop(rid, None)
                if req is not None:
                    req.arrival_time, req.run_start_time = arrival_time, run_start_time
            return outputs
        problem = replica.describe_end()
        return self.lose(number, f"{problem}: {report.error}" if isinstance(report, Report) else problem)

    def lose(self, replica: int, problem: str) -> list[StepOutput]:
        """Go on without a replica that has ended: the ends of its requests. They are not given to another
        replica: one of them may be the reason. Raises `EngineProcessEnded` if it was the last."""
        self.lost.add(replica)
        print(f"error: {problem}; {self.num_replicas} replicas are left", file=sys.stderr, flush=True)
        if self.num_replicas == 0:
            raise self.ended(problem)
        self._end(replica, problem)
        load, reason = self.loads[replica], FinishError(problem, 503)
        return [StepOutput(rid, [], load.num_outputs.get(rid, 0), reason) for rid in load.num_tokens]

    def ended(self, problem: str) -> EngineProcessEnded:
        """End all replicas."""
        self.problem = problem
        for replica in range(len(self.replicas)):
            self._end(replica, problem)
        return EngineProcessEnded(problem)

    def _end(self, replica: int, problem: str) -> None:
        self.replicas[replica].end()
        if replica == 0 and isinstance(self.scheduler, LeadScheduler):
            self.scheduler.end(problem)  # its other ranks


def assemble_replicas(config: EngineConfig, start: Start) -> Assembly:
    """Start config.dp replicas and return the engine of `config`. `start`: a function of a module, which
    starts one replica. Raises `ValueError` as `assemble` does, and `EngineProcessEnded` if a replica cannot
    start."""
    others = [
        Child.spawn(f"replica {i}", _run_replica, start, config_of_replica(config, i))
        for i in range(1, config.dp)
    ]
    with started(others):
        assembly = start(config_of_replica(config, 0))
        pool_sizes = [other.next_message(START_SECONDS) for other in others]
    config = assembly.config.updated(dp=config.dp, device=config.device)
    return replace(
        assembly, config=config, scheduler=controlled(Controller, config, assembly, others, pool_sizes)
    )


def controlled(
    controller: type[Controller],
    config: EngineConfig,
    first: Assembly,
    others: Sequence[Child],
    pool_sizes: Sequence[int],
) -> Controller:
    """The controller of the first replica and of others, whose pools have these sizes."""
    pool_size = min(first.parts.allocator.size, *pool_sizes)
    serve = partial(_serve_first, first.scheduler, first.grammars, str(first.config.device))
    thread = ChildThread("replica 0", partial(serve, controller.steps_when_called))
    replicas = [thread, *others]
    vocab_size = first.model_config.vocab_size
    return controller(config, first.scheduler, first.grammars, vocab_size, pool_size, replicas)


def _serve_first(
    scheduler: Scheduler, grammars: GrammarCompiler, device: str, steps_when_called: bool, inbox: Inbox
) -> None:
    """The main function of the first replica's thread."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # of this thread
    serve_calls(scheduler, grammars, inbox, steps_when_called)


def _run_replica(start: Start, config: EngineConfig, pipe: Channel) -> None:
    """The main function of another replica's process."""
    inbox = Inbox(pipe, list)
    with reported_end(inbox):
        assembly = start(config)
        inbox.start(assembly.parts.allocator.size)
        serve_calls(assembly.scheduler, assembly.grammars, inbox)


def serve_calls(
    scheduler: Scheduler, grammars: GrammarCompiler, inbox: Inbox, steps_when_called: bool = False
) -> None:
    """Make the controller's calls, and run steps while there is work or when the controller requests one."""
    new: dict[str, Req] = {}
    refused: list[StepOutput] = []
    inbox.hear = getattr(scheduler, "hear", None)
    while True:
        is_called, regroup = False, None
        for call in inbox.calls(is_busy=scheduler.has_work() and not steps_when_called):
            if call.method == "step":
                is_called = True  # the latest call, for whose report the controller waits
            elif call.method == "regroup" and is_called:
                regroup = call  # after the step, which may have done it
            elif call.request is not None:
                req = req_of(call.request, grammars)
                try:
                    scheduler.add_request(req)
                    new[req.rid] = req
                except ValueError as error:  # what only this replica can know
                    refused.append(StepOutput(req.rid, [], 0, FinishAbort(str(error), 400)))
            else:
                apply(call, scheduler, grammars)
        if is_called or (scheduler.has_work() and not steps_when_called):
            outputs, refused = refused + scheduler.step(), []
            if regroup is not None:
                apply(regroup, scheduler, grammars)
        elif refused and not steps_when_called:
            outputs, refused = refused, []
        else:
            continue
        started = [new.pop(output.rid) for output in outputs if output.rid in new]
        times = {req.rid: (req.arrival_time, req.run_start_time) for req in started}
        inbox.send(step_report(outputs, scheduler.stats(), times))
