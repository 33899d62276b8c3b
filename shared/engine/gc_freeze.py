"""Python's collector of cyclic garbage, kept from stopping the steps of an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
