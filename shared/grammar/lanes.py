"""Whose grammar is compiled next: one client's slow grammars must not hold up the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LONG_BYTES = 4096
"""Grammars with a longer text have a lane of their own: most of those that take seconds are long."""
MAX_CLIENTS = 1000
"""Clients whose used time is remembered."""

Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Lane:
    """Runs calls of several clients, one at a time in a thread. Next comes the client that has used the least
    time so far. The thread exists while there are calls. `worker`: what the calls share."""

    def __init__(self) -> None:
        self.worker: Any = None
        self._waiting: dict[str, deque[Job]] = {}
        self._used: dict[str, float] = {}  # seconds
        self._lock = threading.Lock()
        self._is_running = False

    def submit(self, client: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """The result to come. A call that has not begun can be cancelled."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, function, args))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="grammar", daemon=True).start()
        return future

    def cancel(self) -> None:
        """Cancel all calls that have not begun."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for jobs in waiting.values():
            for future, _, _ in jobs:
                future.cancel()

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        with self._lock:
            if not self._waiting:
                self._is_running = False
                return False
            client = min(self._waiting, key=lambda each: self._used.get(each, 0.0))
            future, function, args = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
        if not future.set_running_or_notify_cancel():
            return True
        start = time.monotonic()
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        with self._lock:
            if len(self._used) >= MAX_CLIENTS:
                self._used.clear()
            self._used[client] = self._used.get(client, 0.0) + time.monotonic() - start
        return True
