"""What Python does on its own, kept out of a step: collection of garbage, and Ctrl-C."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def gc_freeze() -> Iterator[None]:
    """What is there at the beginning is not searched for garbage until the end of the block.

    A full collection looks at every object: 72 ms once torch is imported, 205 ms with its compiler, and no
    batch is formed meanwhile. It comes after some hundred thousand new objects, so in the middle of a long
    run. Garbage that the block itself makes is collected as before, and freezing and thawing take a
    microsecond. Only for a block, so that nothing of the caller's lives for ever: an engine that is dropped
    gives its memory back. Objects frozen by the caller stay frozen, and so do those of a block
    around this one.
    """
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT inside the block raises KeyboardInterrupt at its end; a second SIGINT raises where it arrives.
    A batch that is half formed or half processed has slots that nothing owns.

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
