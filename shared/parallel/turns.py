"""Two functions that take turns: what one computes hides what the other one waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from diptych.shared.interfaces import Collectives

T = TypeVar("T")


def in_turns(
    ranks: Collectives, first: Callable[[], T], second: Callable[[], T], device: torch.device
) -> list[T]:
    """Run both to their ends. One that waits for an operation of the ranks passes the turn on."""
    turns = Turns()
    ranks.meanwhile = turns.pass_on
    try:
        return turns.run(first, second, device)
    finally:
        ranks.meanwhile = None


class Turns:
    """Two functions on two threads, of which one runs at a time: the first one, until it passes the turn on
    or returns."""

    def __init__(self) -> None:
        self._may_run = (threading.Semaphore(0), threading.Semaphore(0))
        self._turn = 0
        self._has_ended = [False, False]
        self._errors: list[BaseException] = []

    def run(self, first: Callable[[], T], second: Callable[[], T], device: torch.device) -> list[T]:
        """Run both to their ends, on the device's current stream, and return what they return. An error of
        one is raised, and ends the other when it gets the turn."""
        results: list[Any] = [None, None]
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        is_inference = torch.is_inference_mode_enabled()

        def work(number: int, function: Callable[[], T]) -> None:
            try:
                if not self._errors:
                    results[number] = function()
            except BaseException as error:
                self._errors.append(error)
            self._has_ended[number] = True
            self._turn = 1 - number
            self._may_run[1 - number].release()

        def work_beside() -> None:
            self._may_run[1].acquire()
            # Both are settings of a thread.
            with torch.inference_mode(is_inference), torch.cuda.stream(stream):  # None: does nothing
                work(1, second)

        beside = threading.Thread(target=work_beside, name="second half batch", daemon=True)
        beside.start()
        work(0, first)
        beside.join()
        if self._errors:
            raise self._errors[0]
        return results

    # --8<-- [start:pass-the-turn]
    def pass_on(self) -> None:
        """Let the other function run until it passes the turn on or ends."""
        own, other = self._turn, 1 - self._turn
        if self._has_ended[other]:
            return
        self._turn = other
        self._may_run[other].release()
        self._may_run[own].acquire()
        if self._errors:
            raise RuntimeError("the other half of the batch failed")

    # --8<-- [end:pass-the-turn]
