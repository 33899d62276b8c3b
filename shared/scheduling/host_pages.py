"""Which KV pages are in CPU memory: a table from digests of tokens to pages."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

import numpy as np

from diptych.shared.interfaces import HostPool

MIN_LOADED_TOKENS = 10
"""Fewer tokens are computed again as fast as they are loaded."""


class HostPages:
    """Every page is free, or has one digest, or is being read from a disk. The pages of a prefix are used
    from its end on: a page is not given up before those behind it."""

    def __init__(self, pool: HostPool, seed: str) -> None:
        self.pool = pool
        self.seed = seed
        self.pages: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.free = list(range(pool.num_pages))[::-1]

    def clear(self) -> None:
        self.pages.clear()
        self.free = list(range(self.pool.num_pages))[::-1]

    # --8<-- [start:page-digests]
    def digests(self, token_ids: Sequence[int], extra_key: Hashable) -> list[str]:
        """One for each whole page: of the page's tokens and all before them, in their
        namespace."""
        size = self.pool.page_len
        tokens = np.asarray(token_ids, np.int64)
        digest = hashlib.sha256(repr((self.seed, extra_key)).encode())
        found = []
        for start in range(0, len(tokens) - size + 1, size):
            digest.update(tokens[start : start + size].tobytes())
            found.append(digest.hexdigest())
        return found

    # --8<-- [end:page-digests]

    def take(self, num: int, keep: Collection[str]) -> list[int]:
        """Pages for other contents: free ones, then those that were not used for the longest time; without
        those of `keep`, and those whose memory is in use. Fewer, if there are no more."""
        taken = [self.free.pop() for _ in range(min(num, len(self.free)))]
        leaving: list[str] = []
        for digest in self.pages:
            if len(taken) + len(leaving) >= num:
                break
            if digest not in keep and self.lets_go(digest):
                leaving.append(digest)
        return taken + [self.pages.pop(digest) for digest in leaving]

    def lets_go(self, digest: str) -> bool:
        """Whether the memory of this page may have other contents."""
        return True

    def use(self, digests: Sequence[str]) -> None:
        for digest in reversed(digests):  # the first page is the most recent one
            if digest in self.pages:
                self.pages.move_to_end(digest)
