"""Ends a process whose main thread hangs, with the stacks of all threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from shared.engine.child import stacks_of_all_threads

LIMIT = 300.0
"""Time limit of one step in seconds, longer than that of any collective."""
EXIT_HANGS = 70
"""EX_SOFTWARE: never 0, so that a supervisor starts the process again."""


class Watchdog:
    """Ends the process if a step hangs. `describe` returns further text to print."""

    def __init__(self, describe: Callable[[], str], limit: float = LIMIT) -> None:
        self.describe = describe
        self.limit = limit
        self._start: float | None = None  # of the current work
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A block of work that must end within the limit."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        self._start = time.monotonic()
        try:
            yield
        finally:
            self._start = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self.limit / 4, 5.0))
            start = self._start
            if start is not None and time.monotonic() - start > self.limit:
                print(f"a step takes longer than {self.limit:g} s:", stacks_of_all_threads(), file=sys.stderr)
                with contextlib.suppress(Exception):
                    print(self.describe(), file=sys.stderr)
                sys.stderr.flush()
                os._exit(EXIT_HANGS)  # the other processes of the engine end with this one
