"""Keeps garbage collection and Ctrl-C out of a step, and the end of the interpreter out of the engine."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

FEW = 2000
"""More objects than are in the permanent generation before any `gc.freeze`: a collection of Python 3.12 moves
immortal ones there, a few hundred. A freeze adds all others: thousands even before the first import."""


@contextmanager
def gc_freeze() -> Iterator[None]:
    """Exclude objects that exist at the start of the block from garbage collection until its end.

    A full collection visits every object: 72 ms once torch is imported, 205 ms with its compiler, and no
    batch is formed meanwhile. It happens after some hundred thousand new objects, so in the middle of a long
    run. Garbage of the block itself is collected as before; freezing and unfreezing take a microsecond. It
    ends with the block, so that the memory of a dropped engine is freed. Objects that the caller or an outer
    block has frozen stay frozen.
    """
    is_ours = gc.get_freeze_count() < FEW
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def gc_freeze_of_process() -> AbstractContextManager[None]:
    """`gc_freeze` in the main thread. In another one nothing: what it serves is not all of the process."""
    return gc_freeze() if threading.current_thread() is threading.main_thread() else nullcontext()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT inside the block raises KeyboardInterrupt at its end; a second SIGINT raises where it arrives.
    An interrupt in the middle of a batch would leak its slots.

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


def set_at_exit(owner: object) -> threading.Event:
    """An event that is set when the interpreter begins to exit, or when `owner` is freed.

    Python closes the generators that are left only while it frees modules. Work on tensors ends the process
    with SIGABRT then."""
    event = threading.Event()
    weakref.finalize(owner, event.set)
    return event
