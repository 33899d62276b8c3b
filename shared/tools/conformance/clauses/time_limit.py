"""A time limit for code that may never return."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from diptych.shared.tools.conformance.clauses.compare import Mismatch

GRACE = 1.0  # seconds after the end of a check in which a call of its own limit ends first
REPEAT = 1.0  # seconds between alarms once the time is up: code may swallow one


class TimeLimitExceeded(BaseException):
    """Not an `Exception`, so that an implementation that catches those does not catch it."""


class DoesNotReturn(Mismatch):
    """Code under check has reached its time limit. `who`: a rank, or ""."""

    def __init__(self, who: str, seconds: float) -> None:
        self.seconds = seconds
        super().__init__("the call", f"a return within {seconds:g} s", f"none {who}".strip())


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises `TimeLimitExceeded` within the block after `seconds`; None: never.

    It uses a signal, so it works only in the main thread, on Linux and macOS; elsewhere there is no limit. A
    call into C that does not return to Python is not interrupted. Timers nest: an outer timer continues after
    the block.
    """
    if seconds is None or not can_limit_time():
        yield
        return

    def ring(signal_number: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded

    handler_before = signal.signal(signal.SIGALRM, ring)
    start = time.monotonic()
    left_before, interval_before = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler_before)
        if left_before:
            left = left_before - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval_before)


def can_limit_time() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def until(ends_at: float) -> float | None:
    """The seconds of a `time_limit` for work that has to end at a time of time.monotonic; None: no limit."""
    return None if math.isinf(ends_at) else max(ends_at - time.monotonic() + GRACE, 1e-3)
