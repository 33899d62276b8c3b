"""A store for torch's symmetric memory in a process that has had an engine of several ranks before.

torch counts the exchanges of a process over all of its groups, and the number is part of the keys by which
the ranks of a group find each other. A process with an earlier engine counts on, and the new processes of its
other ranks begin at zero: they would wait for each other forever. This store counts from zero in each group.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from torch.distributed import Store

NUMBER = re.compile(r"(?<=/)\d+")
"""In PREFIX/NUMBER/RANK, and in PREFIX/NUMBER of a barrier."""


class CountedStore(Store):
    """The store `inner`, whose keys have the number of the first exchange subtracted."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.inner = inner
        self.first: int | None = None

    def _key(self, key: str) -> str:
        found = NUMBER.search(key)
        if found is None:
            return key
        number = int(found[0])
        if self.first is None:
            self.first = number
        return f"{key[: found.start()]}{number - self.first}{key[found.end() :]}"

    def set(self, key: str, value: Any) -> None:
        self.inner.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self.inner.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.inner.multi_get([self._key(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(self._key(key), amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        self.inner.wait([self._key(key) for key in keys], *limit)
