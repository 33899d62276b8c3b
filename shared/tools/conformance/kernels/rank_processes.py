"""Calls a function on several rank processes: takes the inputs of all ranks and returns all results."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.time_limit import DoesNotReturn
from diptych.shared.tools.conformance.kernels.rank_worker import Answer, Task, serve

GRACE_SECONDS = 3.0
"""That the other ranks have after one has failed: they may wait for it."""
START_SECONDS = 120.0


class RankRaises(Mismatch):
    """The function raises on a rank."""


class RankProcesses:
    """`num_ranks` processes in one group: over NCCL if each can have a GPU, otherwise over gloo on the CPU.
    The first call starts them. After a failure they are ended and the next call starts new ones, because a
    group is broken once its ranks disagree."""

    def __init__(self, target: str, num_ranks: int, seconds: float = 30.0) -> None:
        self.target = target
        self.num_ranks = num_ranks
        self.seconds = seconds
        self.device_type = "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-ranks-")
        self._num_starts = 0
        self.ends_at = float("inf")  # of time.monotonic: the end of the whole check

    @property
    def device_name(self) -> str:
        name, library = "CPU", "gloo"
        if self.device_type == "cuda":
            name, library = torch.cuda.get_device_name(0), "NCCL"
        return f"{name}, {self.num_ranks} processes over {library}"

    def __call__(self, x: torch.Tensor, form: str, layout: str = "", late: int | None = None) -> torch.Tensor:
        """x [num_ranks, num_calls, ...] on the CPU -> results of the same shape. `late`: a rank that waits
        before each call.

        Raises `ValueError` if every rank refuses, `Mismatch` if a rank fails, and `DoesNotReturn` at the time
        limit.
        """
        tasks = [
            Task(self.target, form, tuple(calls.contiguous() for calls in x[rank]), layout, rank == late)
            for rank in range(self.num_ranks)
        ]
        return torch.stack([torch.stack(each.results) for each in self._ask(tasks)])

    def time(self, x: torch.Tensor, form: str, target: str = "") -> float:
        """Seconds of one call on the slowest rank. `target`: another function instead of the one under
        check."""
        tasks = [
            Task(target or self.target, form, (x[rank, 0].contiguous(),), is_timed=True)
            for rank in range(self.num_ranks)
        ]
        return max(each.seconds for each in self._ask(tasks))

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._folder.cleanup()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        is_forked = "forkserver" in methods and self.device_type == "cpu"
        context = multiprocessing.get_context("forkserver" if is_forked else "spawn")
        if is_forked:  # so that torch is imported once, not by each rank
            context.set_forkserver_preload([serve.__module__])
        self._num_starts += 1
        store = str(Path(self._folder.name) / f"store-{self._num_starts}")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            group_seconds = self.seconds + 10 * GRACE_SECONDS
            args = (rank, self.num_ranks, store, self.device_type, group_seconds, theirs)
            process = context.Process(target=serve, args=args, name=f"rank {rank}", daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(START_SECONDS):
                self.end()
                raise RuntimeError(f"rank {rank} does not start within {START_SECONDS:g} s")
            try:
                pipe.recv_bytes()
            except (EOFError, OSError):
                how = self._how_ended(rank)
                self.end()
                raise RuntimeError(f"rank {rank} does not start: {how}") from None

    def _ask(self, tasks: Sequence[Task]) -> list[Answer]:
        if not self._processes:
            self._start()
        for pipe, task in zip(self._pipes, tasks):
            pipe.send_bytes(pickle.dumps(task))
        answers = self._collect()
        if all(answer.refusal for answer in answers.values()) and len(answers) == self.num_ranks:
            raise ValueError(answers[0].refusal)
        ended_first = sorted(
            answers.items(), key=lambda item: not item[1].has_ended
        )  # others lose their peer
        for rank, answer in ended_first:
            if answer.error or answer.wrong or answer.refusal:
                self.end()
                if answer.refusal:
                    raise Mismatch("ranks that refuse", "all or none", f"rank {rank}: {answer.refusal}")
                is_same = all(other.failure == answer.failure for other in answers.values())
                of_all = is_same and len(answers) == self.num_ranks
                kind = RankRaises if answer.error and not answer.has_ended else Mismatch
                raise kind(f"{'all ranks' if of_all else f'rank {rank}'}: {answer.failure}")
        if len(answers) < self.num_ranks:
            missing = [rank for rank in range(self.num_ranks) if rank not in answers]
            self.end()
            raise DoesNotReturn(f"ranks {missing}", self.seconds)
        return [answers[rank] for rank in range(self.num_ranks)]

    def _collect(self) -> dict[int, Answer]:
        """The answers by rank; returns when all have answered, at the time limit, or when a rank has failed
        and the others wait."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + self.seconds
        while len(answers) < self.num_ranks and (left := deadline - time.monotonic()) > 0:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            for pipe in wait(waiting, left):
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    how = f"the process has ended with {self._how_ended(rank)}"
                    answers[rank] = Answer(error=how, has_ended=True)
                if not answers[rank].results and not answers[rank].seconds:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _how_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GRACE_SECONDS)
        code = process.exitcode
        if code is None:
            return "a closed connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
