"""A log of collectives, and the first place where the logs of two ranks differ.

Ranks that call different collectives wait for each other until a time limit. The logs show which call
differs: each entry has the operation, its shape and dtype, and the calling line of code.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from diptych.shared.interfaces import Collectives

LENGTH = 1000
"""The number of entries kept."""


class Entry(NamedTuple):
    """One call of a collective. Two ranks agree if all but `caller` are equal."""

    number: int
    op: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    caller: str  # file:line

    def __str__(self) -> str:
        return f"#{self.number} {self.op} of {self.dtype} {list(self.shape)} in {self.group} ({self.caller})"


class CollectiveLog:
    """The latest calls of one rank."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=LENGTH)
        self._number = 0

    def clear(self) -> None:
        """Begin again, with another group."""
        self.entries.clear()
        self._number = 0

    def add(self, op: str, group: str, x: torch.Tensor, any_rows: bool = False) -> None:
        """Add an entry, before the operation. `any_rows`: the number of rows may differ by rank."""
        self._number += 1
        shape = tuple(x.shape[1:]) if any_rows else tuple(x.shape)
        dtype = str(x.dtype).removeprefix("torch.")
        self.entries.append(Entry(self._number, op, group, shape, dtype, _caller()))


def _caller() -> str:
    """The caller of the operation: the first frame outside of collectives."""
    frame = sys._getframe(2)
    while frame.f_back is not None and isinstance(frame.f_locals.get("self"), Collectives):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def entries_of(groups: Sequence[Collectives]) -> list[Entry]:
    """The entries of a rank's groups."""
    return [entry for group in groups for entry in group.log.entries.copy()]


def first_difference(logs: Sequence[Sequence[Entry]]) -> str | None:
    """A text about the first difference of the ranks' logs (in the order of ranks), within each group; None:
    the logs agree and end with the same call. The ranks of a group are those with an entry of it, and those
    without any."""
    for group in sorted({entry.group for log in logs for entry in log}):
        own = {i: [each for each in log if each.group == group] for i, log in enumerate(logs)}
        found = _difference_of({i: log for i, log in own.items() if log or not logs[i]})
        if found is not None:
            return found
    return None


def _difference_of(logs: Mapping[int, Sequence[Entry]]) -> str | None:
    by_number = [{entry.number: entry for entry in log} for log in logs.values()]
    starts = [min(entries, default=1) for entries in by_number]
    ends = [max(entries, default=0) for entries in by_number]
    for number in range(max(starts), max(ends) + 1):
        entries = [each.get(number) for each in by_number]
        if len({entry[1:-1] if entry is not None else None for entry in entries}) > 1:
            lines = [f"rank {rank}: {entry or 'did not call it'}" for rank, entry in zip(logs, entries)]
            return f"the ranks differ from collective #{number} on:\n" + "\n".join(lines)
    return None
