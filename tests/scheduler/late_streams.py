"""A simulated slow device: results arrive as late as possible, or at any moment before.

A batch runs when the scheduler waits for it, or when later launches force it. So a change by the scheduler to
data that a batch in flight still reads shows in the tokens.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from diptych.optimized.overlap.future_map import FutureMap
from diptych.optimized.overlap.streams import Done, Pending, Streams, Work
from diptych.optimized.scheduler import Scheduler


class LateStreams(Streams):
    """`rng`: each launch lets a random number of batches pass; None: only waiting does."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng
        self.queue: deque[LatePending] = deque()

    def launch(self, work: Work) -> Pending:
        pending = LatePending(self, work)
        self.queue.append(pending)
        if self.rng is not None:
            for _ in range(self.rng.randint(0, len(self.queue))):
                self.run_oldest()
        return pending

    def copy(self, tensors: Any) -> Pending:
        return Done(tensors)

    def run_oldest(self) -> None:
        pending = self.queue.popleft()
        pending.result, pending.is_done = pending.work(), True


class LatePending(Pending):
    def __init__(self, streams: LateStreams, work: Work) -> None:
        self.streams = streams
        self.work = work
        self.is_done = False
        self.result: Any = None

    def wait(self) -> Any:
        while not self.is_done:
            self.streams.run_oldest()
        return self.result


class LateScheduler(Scheduler):
    """Batches run as late as they can."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        make_late(self)


class UnsteadyScheduler(Scheduler):
    """Batches run at any time, and the ring has the least size."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        make_late(self, random.Random(0))
        ring, max_batch_size = self.pipeline.future_map, self.config.max_running_requests + 1
        self.pipeline.future_map = FutureMap(max_batch_size, ring.token_ids.device, 2 * max_batch_size)


def make_late(scheduler: Scheduler, rng: random.Random | None = None) -> None:
    scheduler.pipeline.streams = LateStreams(rng)
    scheduler.parts.model_runner.is_late = True
    if scheduler.parts.drafter is not None:
        scheduler.parts.drafter.is_late = True
