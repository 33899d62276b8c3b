"""Runs the seeds of several checks in several processes, and records what is found while they run."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

Alarms = tuple[int, int, list[str]]
"""Cases checked, cases refused, and alarms of one seed."""
Rows = dict[str, dict[str, Any]]
WRITE_SECONDS = 5.0
STAYS = 2.0
"""A process leaves its task when another has so many times the work left."""


class Task(NamedTuple):
    """`run(seed, names)` gives what is found for each of the names. A process is given it by pickling.
    `cases`: run(0, names, case) comes first for each of so many, which compiles kernels in all processes.
    `rank`: tasks of a lower one come first."""

    names: list[str]
    run: Callable[..., dict[str, Alarms]]
    cases: int = 0
    rank: int = 0


class Ends(Exception):
    """What a task raises if its process cannot go on. `found`: alarms of the name that ended it."""

    def __init__(self, name: str, found: list[str]) -> None:
        super().__init__(name, found)
        self.name, self.found = name, found


class Record:
    """The rows of a file. A row counts seeds from 0 on without a gap."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: Rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self._waiting: dict[str, dict[int, Alarms]] = {}
        self._written_at = time.monotonic()

    def next_seed(self, name: str) -> int:
        return int(self.rows.get(name, {"seeds": 0})["seeds"])

    def add(self, name: str, seed: int, found: Alarms) -> None:
        row = self._row(name)
        waiting = self._waiting.setdefault(name, {})
        waiting[seed] = found
        while row["seeds"] in waiting:
            checks, refused, alarms = waiting.pop(row["seeds"])
            row["seeds"], row["checks"] = row["seeds"] + 1, row["checks"] + checks
            row["refused"], row["alarms"] = row["refused"] + refused, row["alarms"] + alarms
        if time.monotonic() > self._written_at + WRITE_SECONDS:
            self.write()

    def _row(self, name: str) -> dict[str, Any]:
        return self.rows.setdefault(name, {"seeds": 0, "checks": 0, "refused": 0, "alarms": []})

    def fail(self, name: str, alarms: list[str]) -> None:
        """Alarms of a seed that has not ended."""
        self._row(name)["alarms"] += alarms

    def write(self) -> None:
        """A stop while it writes leaves the file before."""
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in self.rows.items())
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        new.replace(self.path)
        self._written_at = time.monotonic()


class ThisProcess(Executor):
    """Runs what is submitted at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def executors_of(processes: int) -> list[Executor]:
    """One of each process: it goes on with the task whose kernels it has loaded, which takes seconds."""
    if processes == 1:
        return [ThisProcess()]
    context = multiprocessing.get_context("spawn")
    return [ProcessPoolExecutor(1, mp_context=context) for _ in range(processes)]


def warm_up(executors: list[Executor], tasks: list[Task], goes_on: Callable[[], bool]) -> None:
    calls = sorted((case, i) for i, task in enumerate(tasks) for case in range(task.cases))
    left = {
        executor.submit(tasks[i].run, 0, tasks[i].names, case)
        for executor, (case, i) in zip(cycle(executors), calls, strict=False)
    }
    while left and goes_on():
        left = wait(left, timeout=1.0).not_done
    for each in left:
        each.cancel()


def run_seeds(
    tasks: dict[str, Task],
    seeds: int,
    path: Path,
    processes: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Rows:
    """The next seed is of the task that has most left to do for each process at it, so that all end together.
    Other seeds of a task wait for its first one. A task that raises ends; `Ends`, and the end of a process,
    end all. No seed begins when `goes_on()` is false."""
    record = Record(path)
    following = {key: min(map(record.next_seed, task.names)) for key, task in tasks.items()}
    first = dict(following)
    running: dict[Future[dict[str, Alarms]], tuple[Executor, str, int, float]] = {}
    fastest: dict[str, float] = {}
    last: dict[Executor, str] = {}

    def next_task(executor: Executor) -> str | None:
        at_it = Counter(key for _, key, *_ in running.values())

        def urgency(key: str) -> tuple[int, float]:
            left = (seeds - following[key]) * fastest.get(key, 1.0) / (1 + at_it[key])
            return -tasks[key].rank, left * (STAYS if last.get(executor) == key else 1.0)

        free = [
            key for key, seed in following.items() if seed < seeds and (key in fastest or seed == first[key])
        ]
        return max(free, key=urgency, default=None) if goes_on() else None

    executors = executors_of(processes)
    with ExitStack() as pools:
        for each in executors:
            pools.enter_context(each)
        try:
            if processes > 1:
                warm_up(executors, [each for key, each in tasks.items() if following[key] < seeds], goes_on)
            while True:
                busy = {executor for executor, *_ in running.values()}
                for executor in executors:
                    if executor in busy or (key := next_task(executor)) is None:
                        continue
                    seed, task = following[key], tasks[key]
                    names = [each for each in task.names if seed >= record.next_seed(each)]
                    begun = time.monotonic()
                    running[executor.submit(task.run, seed, names)] = executor, key, seed, begun
                    following[key], last[executor] = seed + 1, key
                if not running:
                    return record.rows
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    _, key, seed, begun = running.pop(future)
                    try:
                        result = future.result()
                    except Ends as end:
                        record.fail(end.name, end.found)
                        raise
                    except BrokenExecutor:
                        raise
                    except Exception as error:
                        for name in tasks[key].names:
                            record.fail(name, [f"seed {seed} ended: {type(error).__name__}: {error}"])
                        following[key] = seeds
                        continue
                    for name, found in result.items():
                        record.add(name, seed, found)
                    fastest[key] = min(fastest.get(key, float("inf")), time.monotonic() - begun)
        finally:
            record.write()
            for each in executors:
                each.shutdown(wait=False, cancel_futures=True)
