"""Ctrl-C at a step boundary: a batch that is half formed or half processed has slots that nothing owns."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT inside the block raises KeyboardInterrupt at its end; a second SIGINT raises where it arrives.

    Applies to the main thread, which alone receives signals, and only where Python's own handler is
    installed. A program with its own handler keeps it; a nested block does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_pending = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal is_pending
        if is_pending:
            signal.default_int_handler(signum, frame)
        is_pending = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_pending:
            raise KeyboardInterrupt
