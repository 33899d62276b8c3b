"""One rank process: joins the group and runs the calls that it receives."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from diptych.shared import registry
from diptych.shared.parallel.meeting import use_loopback
from diptych.shared.tools.conformance.clauses.poison import amid_poison, guarded, memory_of, run_poisoned

LATE_SECONDS = 0.01
LAYOUTS = ("", "slices of wider rows", "transposed", "begins at an odd element")


@dataclass(frozen=True)
class Form:
    """How the function is called with a tensor and the group, and whether it sums in place."""

    arguments: Callable[[Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]
    is_in_place: bool = False


FORMS = {
    "torch": Form(lambda x, group: ((x,), {"group": group}), is_in_place=True),
    "torch-functional": Form(lambda x, group: ((x, "sum", group), {})),
    "vllm": Form(lambda x, group: ((x,), {})),
}


@dataclass(frozen=True)
class Task:
    """Work for a rank. `calls`: this rank's tensor for each of the successive calls. `layout`: one of
    `LAYOUTS`. `is_late`: whether this rank waits before each call. `is_timed`: the answer is a time in
    seconds."""

    target: str
    form: str
    calls: tuple[torch.Tensor, ...]
    layout: str = ""
    is_late: bool = False
    is_timed: bool = False


@dataclass(frozen=True)
class Answer:
    """A rank's answer. `results`: of each call, on the CPU. `refusal`, `error`: why there are none. `wrong`:
    what is wrong apart from the values. `has_ended`: whether the process has ended."""

    results: tuple[torch.Tensor, ...] = ()
    seconds: float = 0.0
    refusal: str = ""
    error: str = ""
    wrong: str = ""
    has_ended: bool = False

    @property
    def failure(self) -> str:
        """What is wrong: a sentence whose subject, the rank, is missing."""
        if not self.error:
            return self.wrong
        return self.error if self.has_ended else f"raises {self.error}"


def serve(rank: int, size: int, store: str, device_type: str, seconds: float, pipe: Connection) -> None:
    """The main function of the process, which ends when its parent ends."""
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    use_loopback()
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    pipe.send_bytes(b"ready")
    functions: dict[str, Callable[..., Any]] = {}
    while True:
        try:
            task: Task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the group may be broken on other ranks, so it is not closed
        pipe.send_bytes(pickle.dumps(answer(task, functions, device)))


def answer(task: Task, functions: dict[str, Callable[..., Any]], device: torch.device) -> Answer:
    try:
        if task.target not in functions:
            functions[task.target] = registry.load("function", task.target)
        if task.is_timed:
            return _time(task, functions[task.target], device)
        return _run(task, functions[task.target], device)
    except (ValueError, NotImplementedError) as error:
        return Answer(refusal=f"{type(error).__name__}: {error}")
    except Exception as error:  # any exception is a failure of the function
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(error=f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})")


def _run(task: Task, function: Callable[..., Any], device: torch.device) -> Answer:
    form = FORMS[task.form]
    inputs = [laid_out(x.to(device), task.layout) for x in task.calls]
    before = [memory_of(x, without_it=form.is_in_place) for x in inputs]
    results = []
    for x in inputs:
        if task.is_late:
            time.sleep(LATE_SECONDS)
        args, kwargs = form.arguments(x, distributed.group.WORLD)
        returned = run_poisoned(partial(function, *args, **kwargs))
        if hasattr(returned, "wait"):
            returned = returned.wait()
        result = x if form.is_in_place else returned
        if not isinstance(result, torch.Tensor):
            return Answer(wrong=f"returns {type(result).__name__}, not a tensor")
        for name in ("shape", "dtype", "device"):
            if (made := getattr(result, name)) != getattr(x, name):
                text = list(made) if name == "shape" else str(made).removeprefix("torch.")
                return Answer(wrong=f"{name} of out: {text}, expected that of the input")
        results.append(result)
    found = tuple(result.detach().cpu().contiguous() for result in results)  # all are live at the end
    for x, copy in zip(inputs, before):
        if not torch.equal(memory_of(x, without_it=form.is_in_place), copy):
            beside = "memory beside the tensor" if form.is_in_place else "the input, or memory beside it,"
            return Answer(found, wrong=f"{beside} is modified")
    return Answer(found)


def _time(task: Task, function: Callable[..., Any], device: torch.device) -> Answer:
    from diptych.shared.tools.bench.ceilings import median_time

    (x,) = task.calls
    x = x.to(device).zero_()  # a sum in place grows with each call
    args, kwargs = FORMS[task.form].arguments(x, distributed.group.WORLD)

    def call() -> None:
        returned = function(*args, **kwargs)
        if hasattr(returned, "wait"):
            returned.wait()

    with torch.inference_mode():
        return Answer(seconds=median_time(call, device))


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of the same values with other strides, or at another address."""
    if layout == "slices of wider rows":
        return amid_poison(x, margin=16)
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "begins at an odd element":
        return amid_poison(x.flatten(), margin=1).view(x.shape)
    return guarded(x)
