"""The time in which a check says that it ends."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable

FOR_REPORT = 5.0
"""The most seconds of the announced time that are left for the report."""


def drawn(seed: int | None) -> int:
    """The seed, or a secret one."""
    return secrets.randbelow(2**31) if seed is None else seed


class Announced:
    """Prints the time that a check takes at most, which begins now. Work ends at `ends_at`, of `clock`; the
    rest is for the report."""

    def __init__(
        self, what: str, seconds: float, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.clock, self.start = seconds, clock, clock()
        self.ends_at = self.start + seconds - min(FOR_REPORT, seconds / 5)
        print(f"{what}; the check ends within {seconds:g} s; --seed {seed} repeats it", file=sys.stderr)

    @property
    def late(self) -> list[str]:
        """A sentence, if the check took longer than it announced."""
        taken = self.clock() - self.start
        if taken <= self.seconds:
            return []
        more = f"{taken - self.seconds:.0f} s more than announced"
        return [
            f"The check took {taken:.0f} s, {more}: a computation could not be interrupted. What is reported "
            "was done before"
        ]
