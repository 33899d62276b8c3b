"""How long scheduler steps take, and how much of that is the model and the sampler: seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shared.interfaces import ModelRunner, Sampler, Scheduler


@dataclass
class StepTimes:
    """Sums over the steps that were timed, in seconds."""

    num_steps: int = 0
    step: float = 0.0
    forward: float = 0.0  # 0 where model and sampler run as one piece
    sample: float = 0.0  # likewise
    model_and_sampler: float = 0.0  # both, and what is between them, however they were called

    @property
    def outside_share(self) -> float:
        """Share of the steps' time that neither the model's forward pass nor the sampler took: scheduling,
        prefix cache, allocation, batch tensors, finish checks."""
        return (self.step - self.model_and_sampler) / self.step if self.step else 0.0


@contextmanager
def time_steps(
    scheduler: Scheduler,
    model_runner: ModelRunner,
    sampler: Sampler,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[StepTimes]:
    """Within the block, the three objects' methods are timed; afterwards they are as before.

    `synchronize` waits for the device, before each reading of the clock: without it a GPU's work would be
    charged to whoever waits for it. It also takes away the overlap, so speed is measured without timer.
    """
    times = StepTimes()
    depth = 0  # of calls to model runner and sampler: the outermost counts

    def timed(call: Callable[..., Any], field: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            synchronize()
            start = clock()
            depth += field != "step"
            try:
                return call(*args, **kwargs)
            finally:
                synchronize()
                seconds = clock() - start
                depth -= field != "step"
                if field != "model_and_sampler":
                    setattr(times, field, getattr(times, field) + seconds)
                if field != "step" and depth == 0:
                    times.model_and_sampler += seconds
                times.num_steps += field == "step"

        return wrapper

    targets: list[tuple[Any, str, str]] = [
        (scheduler, "step", "step"),
        (model_runner, "forward_and_sample", "model_and_sampler"),
        (model_runner, "forward", "forward"),
        (sampler, "sample", "sample"),
    ]
    for target, method, field in targets:
        # An attribute of the instance hides the class's method until it is deleted again.
        setattr(target, method, timed(getattr(target, method), field))
    try:
        yield times
    finally:
        for target, method, _ in targets:
            delattr(target, method)


def device_synchronizer(device: str) -> Callable[[], None]:
    """What waits for the device's work; nothing on a CPU."""
    import torch

    if device.startswith("cuda"):
        return lambda: torch.cuda.synchronize(device)
    if device == "mps":
        return torch.mps.synchronize
    return lambda: None
