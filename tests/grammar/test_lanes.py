"""Slow grammars of one client and the others' grammars."""

from __future__ import annotations

import threading
import time

from diptych.shared.grammar.lanes import Lane


def test_the_client_that_has_used_the_least_time_is_next() -> None:
    lane, order, gate = Lane(), [], threading.Event()

    def run(name: str, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        order.append(name)

    lane.submit("a", gate.wait)
    futures = [lane.submit("a", run, f"a{i}", 0.05) for i in range(3)]
    futures += [lane.submit("b", run, f"b{i}") for i in range(2)]
    time.sleep(0.05)  # of a's
    gate.set()
    for future in futures:
        future.result(60)
    assert order == ["b0", "b1", "a0", "a1", "a2"]


def test_what_has_not_begun_can_be_cancelled() -> None:
    lane, gate = Lane(), threading.Event()
    first, left, kept = lane.submit("a", gate.wait), lane.submit("a", int), lane.submit("a", int, 3)
    assert left.cancel()
    gate.set()
    assert (first.result(60), kept.result(60)) == (True, 3)
    assert lane.submit("a", int, 4).result(60) == 4  # the thread may have ended meanwhile
    gate.clear()
    running, waiting = lane.submit("a", gate.wait), lane.submit("a", int)
    while not running.running():
        time.sleep(0.01)
    lane.cancel()
    assert waiting.cancelled()
    gate.set()
    assert running.result(60)
