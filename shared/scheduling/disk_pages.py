"""Pages on their way between CPU memory and a disk tier.

A page of CPU memory that is written or read is not used for other contents until this has ended. A write that
has not begun is cancelled instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from diptych.shared.interfaces import DiskTier, PageMemory, PrefixCache, RadixKey
from diptych.shared.scheduling.host_pages import MIN_LOADED_TOKENS, HostPages
from diptych.shared.types import Req

MAX_WAIT_SECONDS = 2.0
"""A request whose pages have not arrived after this time, from its turn to join, computes them."""
IDLE_SECONDS = 0.01
"""A step waits that long for a page if it has nothing to compute."""


@dataclass
class Asked:
    """Pages that a waiting request would load."""

    digests: list[str]
    found: Future[int] | None  # how many the tier has; None: their reads have begun
    deadline: float = math.inf  # set when a request could join without them


class DiskPages:
    def __init__(self, host: HostPages, tier: DiskTier) -> None:
        self.host = host
        self.tier = tier
        self.asked: dict[str, Asked] = {}  # by request
        self.writes: dict[str, Future[bool]] = {}  # by digest
        self.reads: dict[str, Future[bool]] = {}
        self.arriving: dict[str, int] = {}  # digest -> the page to which it is read

    # --8<-- [start:disk-writes]
    def write(self, digests: Sequence[str]) -> None:
        """Write pages that are in CPU memory, or on their way there."""
        wait_for_copies = self.host.pool.copies_so_far()
        for digest in digests:
            views = self.host.pool.page_views(self.host.pages[digest])
            self.writes[digest] = self.tier.write(digest, PageMemory(views, wait_for_copies))

    def lets_go(self, digest: str) -> bool:
        """Whether the memory of the page may have other contents."""
        write = self.writes.get(digest)
        if write is not None and not write.cancel() and not write.done():
            return False
        self.writes.pop(digest, None)
        return True

    # --8<-- [end:disk-writes]

    # --8<-- [start:disk-reads]
    def ask(self, req: Req, tree: PrefixCache) -> None:
        """Begin to read what neither the tree nor CPU memory has of a request's prefix."""
        key = RadixKey(req.all_ids[: req.max_prefix_len], req.extra_key)
        start = len(tree.match_prefix(key).device_indices)
        if len(key) - start < MIN_LOADED_TOKENS:
            return
        digests = self.host.digests(key.token_ids, key.extra_key)[start // self.host.pool.page_len :]
        missing = [digest for digest in digests if digest not in self.host.pages]
        found = self.tier.find(missing) if missing else None
        self.asked[req.rid] = Asked(missing, found)

    def has_arrived(self, req: Req, tree: PrefixCache, may_wait: bool) -> bool:
        """Whether the reads for a request have ended. may_wait: nothing else is to do."""
        if req.rid not in self.asked:  # a retracted request
            self.ask(req, tree)
        asked = self.asked.get(req.rid)
        if asked is None or self._has_ended(asked):
            return True
        asked.deadline = min(asked.deadline, time.monotonic() + MAX_WAIT_SECONDS)
        if may_wait:
            wait(self._pending(asked), IDLE_SECONDS, FIRST_COMPLETED)
        return self._has_ended(asked) or time.monotonic() > asked.deadline

    # --8<-- [end:disk-reads]

    def _has_ended(self, asked: Asked) -> bool:
        if asked.found is not None and asked.found.done():
            asked.digests = asked.digests[: asked.found.result()]
            asked.found = None
            self._read(asked)
        self._collect()
        return asked.found is None and not self._pending(asked)

    def _pending(self, asked: Asked) -> list[Future[Any]]:
        if asked.found is not None:
            return [asked.found]
        return [self.reads[digest] for digest in asked.digests if digest in self.reads]

    def _read(self, asked: Asked) -> None:
        """Begin to read pages to at most half of the memory, so that pages can be stored meanwhile."""
        digests = [each for each in asked.digests if each not in self.host.pages and each not in self.reads]
        room = max(self.host.pool.num_pages // 2, 1) - len(self.reads)
        pages = self.host.take(max(min(len(digests), room), 0), keep=set(asked.digests))
        wait_for_copies = self.host.pool.copies_so_far()
        for digest, page in zip(digests, pages):
            self.arriving[digest] = page
            memory = PageMemory(self.host.pool.page_views(page), wait_for_copies)
            self.reads[digest] = self.tier.read(digest, memory)

    def _collect(self) -> None:
        """Let pages that have arrived be found, and those that could not be read be free."""
        for digest in [digest for digest, read in self.reads.items() if read.done()]:
            page, is_whole = self.arriving.pop(digest), self.reads.pop(digest).result()
            if is_whole and digest not in self.host.pages:
                self.host.pages[digest] = page
            else:
                self.host.free.append(page)

    def finish(self) -> None:
        """Wait for all that is on its way."""
        for future in [*self.writes.values(), *self.reads.values()]:
            future.result()
        self._collect()

    def finish_writes(self) -> None:
        """Wait for the writes; another thread may go on."""
        wait([*self.writes.values()])

    def stop(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        self.host.pool.copies_so_far()
        wait([each for each in (*self.writes.values(), *self.reads.values()) if not each.cancel()])
        for table in (self.asked, self.writes, self.reads, self.arriving):
            table.clear()
