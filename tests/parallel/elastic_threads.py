"""Replicas in threads, whose ranks die, or miss each other, in a certain call."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.processes.child import Child, Inbox, InboxClosed
from diptych.shared.engine.processes.child_messages import Ready
from diptych.shared.engine.processes.input_log import CallClock
from diptych.shared.engine.processes.ranks import assemble_lead, collectives_of, repeat
from diptych.shared.engine.processes.replicas import controlled, serve_calls
from diptych.shared.engine.processes.replicas_in_step import (
    ControllerInStep,
    ScheduleInStep,
    assemble_replica,
    in_step,
)
from diptych.shared.parallel import channel
from diptych.shared.parallel.grid import groups_of, join_ranks


class Died(BaseException):
    """In place of the end of a process."""


class Trap:
    """Calls `then` in the place of a call of a method, or after it."""

    def __init__(
        self, of: Any, name: str, number: int, then: Callable[[], None], after: bool = False
    ) -> None:
        self.inner, self.number, self.then, self.after = getattr(of, name), number, then, after
        setattr(of, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.number -= 1
        if self.number == 0 and not self.after:
            self.then()
        result = self.inner(*args, **kwargs)
        if self.number == 0 and self.after:
            self.then()
        return result


def die() -> None:
    raise Died


Plant = Callable[[ScheduleInStep], None]


class Threads:
    """A controller, and the ranks of its replicas as threads. A rank that dies takes its replica with it, as
    processes do: the first sees the end of the others, and these that of the first."""

    def __init__(self, config: EngineConfig, plants: dict[int, Plant], seconds: float = 20.0) -> None:
        self.config, self.plants, self.seconds = config, plants, seconds
        self.store, self.schedulers = HashStore(), dict[int, ScheduleInStep]()
        self.threads: list[threading.Thread] = []
        others = [self.thread(f"replica {i}", i * config.tp, self.lead) for i in range(1, config.dp)]
        first = self.assembled(0)
        sizes = [other.next_message(seconds) for other in others]
        self.controller = controlled(ControllerInStep, first.config, first, others, sizes)

    def thread(self, name: str, rank: int, run: Callable[[int, Inbox], None]) -> Child:
        mine, theirs = channel.pair()
        inbox = Inbox(theirs, list, leave=lambda code: self.orphan(rank, inbox))
        self.threads.append(threading.Thread(target=self.to_the_end, args=(rank, inbox, run), daemon=True))
        self.threads[-1].start()
        return Child(name, mine)

    def orphan(self, rank: int, inbox: Inbox) -> None:
        if self.config.tp == 1:
            return  # the thread waits until the tests end
        survivors = self.schedulers[rank].survivors
        assert survivors is not None
        survivors.is_torn = lambda: True
        inbox.close()

    def to_the_end(self, rank: int, inbox: Inbox, run: Callable[[int, Inbox], None]) -> None:
        try:
            run(rank, inbox)
        except BaseException as error:
            if not isinstance(error, Died | InboxClosed):
                print(f"rank {rank}: {type(error).__name__}: {error}")
        for group in groups_of(self.schedulers[rank].dp):
            group.leave()
        with contextlib.suppress(OSError):
            inbox.pipe.connection.shutdown(socket.SHUT_RDWR)

    def wrap(self, assembly: Assembly, ranks: Any) -> Assembly:
        return self.planted(ranks.rank, in_step(assembly, ranks))

    def planted(self, rank: int, assembly: Assembly) -> Assembly:
        scheduler: Any = assembly.scheduler
        self.schedulers[rank] = scheduler
        self.plants.get(rank, lambda each: None)(scheduler)
        return assembly

    def assembled(self, rank: int) -> Assembly:
        if self.config.tp == 1:
            assembly = assemble_replica(self.config, self.store, rank, self.seconds)
            return self.planted(rank, assembly)
        followers = [
            self.thread(f"rank {part}", rank + part, self.follow) for part in range(1, self.config.tp)
        ]
        return assemble_lead(self.config, self.store, followers, self.seconds, rank, wrap=self.wrap)

    def lead(self, rank: int, inbox: Inbox) -> None:
        assembly = self.assembled(rank)
        scheduler: Any = assembly.scheduler
        inbox.start(assembly.parts.allocator.size)
        try:
            serve_calls(scheduler, assembly.grammars, inbox, steps_when_called=True)
        finally:
            if self.config.tp > 1:
                scheduler.end("dead")

    def follow(self, rank: int, inbox: Inbox) -> None:
        inbox.send(Ready())
        ranks = join_ranks(collectives_of(self.config), self.config, self.store, rank, self.seconds)
        clock = CallClock()
        assembly = self.wrap(assemble(self.config, clock, tp=ranks), ranks)
        inbox.hear = getattr(assembly.scheduler, "hear", None)
        inbox.start()
        while True:
            for call in inbox.calls(is_busy=False):
                assembly = repeat(call, assembly, clock)


def in_threads(
    config: EngineConfig, plants: dict[int, Plant], seconds: float = 20.0
) -> tuple[ControllerInStep, list[ScheduleInStep]]:
    """A controller of replicas of one rank, and these."""
    threads = Threads(config, plants, seconds)
    return threads.controller, [threads.schedulers[rank] for rank in range(config.dp)]
