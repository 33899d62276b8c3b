"""Ends a process whose main thread hangs, with the stacks of all threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from diptych.shared.engine.processes.child import stacks_of_all_threads

LIMIT = 300.0
"""Time limit of one step in seconds, longer than that of any collective."""
EXIT_HANGS = 70
"""EX_SOFTWARE: never 0, so that a supervisor starts the process again."""


POLL_SECONDS = 5.0
"""Interval of looking. A step that waits on a GPU for a rank that has ended may last twice as long."""


class Watchdog:
    """Ends the process if a step hangs. `describe` returns further text to print. `has_ended` says whether
    another rank has ended: a step that goes on waits for it, as a kernel on a GPU does without end."""

    def __init__(
        self,
        describe: Callable[[], str],
        limit: float = LIMIT,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.describe = describe
        self.limit = limit
        self.has_ended = has_ended
        self._start: float | None = None  # of the current work
        # It ends after this object is gone. A thread cannot be started at the end of the interpreter.
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="watchdog", daemon=True).start()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A block of work that must end within the limit."""
        self._start = time.monotonic()
        try:
            yield
        finally:
            self._start = None

    def look(self, waits: float | None) -> float | None:
        """Look once. `waits`: what the last look returned: the start of a step during which another rank had
        ended."""
        start = self._start
        if start is None:
            return None
        if time.monotonic() - start > self.limit:
            self._end(f"a step takes longer than {self.limit:g} s:")
        if not self.has_ended():
            return None
        if waits == start:
            self._end("another rank has ended, and a step waits for it:")
        return start

    def _end(self, problem: str) -> None:
        """Now: the other processes of the engine end with this one."""
        print(problem, stacks_of_all_threads(), file=sys.stderr)
        with contextlib.suppress(Exception):
            print(self.describe(), file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_HANGS)


def _watch(reference: weakref.ref[Watchdog]) -> None:
    waits: float | None = None
    while (watchdog := reference()) is not None:
        waits = watchdog.look(waits)
        seconds = min(watchdog.limit / 4, POLL_SECONDS)
        del watchdog
        time.sleep(seconds)
