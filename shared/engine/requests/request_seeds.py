"""Seeds of requests that bring none: one generator, from which a refused call takes nothing."""

from __future__ import annotations

import random


class RequestSeeds:
    """Not thread-safe: the engine's lock is held."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)
        self._num_drawn = 0

    def draw(self) -> int:
        self._num_drawn += 1
        return self._random.getrandbits(63)

    def mark(self) -> tuple[int, object]:
        """The state now, for `undo`."""
        return self._num_drawn, self._random.getstate()

    def undo(self, mark: tuple[int, object], num_drawn: int) -> None:
        """Return to a mark since when `num_drawn` seeds were drawn. If another thread has drawn too, its
        seeds are in use and must not be drawn again: then nothing changes."""
        before, state = mark
        if self._num_drawn == before + num_drawn:
            self._num_drawn = before
            self._random.setstate(state)  # type: ignore[arg-type]
