"""The alarm rings through code that swallows exceptions, and leaves other timers alone."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from diptych.shared.tools.conformance.clauses.time_limit import (
    REPEAT,
    TimeLimitExceeded,
    can_limit_time,
    time_limit,
)


def run_for_ever() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def test_it_ends_what_does_not_end() -> None:
    start = time.monotonic()
    with pytest.raises(TimeLimitExceeded), time_limit(0.05):
        run_for_ever()
    assert time.monotonic() - start < 30


def swallow_once() -> None:
    try:
        run_for_ever()
    except BaseException:
        run_for_ever()


def test_it_rings_again_when_swallowed() -> None:
    with pytest.raises(TimeLimitExceeded), time_limit(0.05):
        swallow_once()
    assert REPEAT <= 1


def test_what_ends_in_time_is_left_alone_and_so_is_a_timer_that_was_running() -> None:
    rung: list[float] = []
    handler_before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    before = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with time_limit(5.0):
            time.sleep(0.1)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 0.25
        time.sleep(0.5)
        assert len(rung) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler_before)


def test_without_a_limit_and_outside_the_main_thread_there_is_none() -> None:
    with time_limit(None):
        assert signal.getsignal(signal.SIGALRM) is not None
    seen: list[bool] = []

    def work() -> None:
        seen.append(can_limit_time())
        with time_limit(0.01):
            time.sleep(0.05)
        seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]
    assert can_limit_time()
