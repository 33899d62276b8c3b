"""The free pages as a ring buffer: the pages of a batch are allocated and freed by one array operation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


class PageRing:
    """Pages 1..num_pages, allocated first in, first out. Each page is either in the `num_free`
    entries of the ring from `_head` on, or has `_is_used` set."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._ring: Array = np.arange(1, num_pages + 1)
        self._head = 0
        self._is_used = np.zeros(num_pages + 1, np.bool_)
        self._stamps = np.zeros(num_pages + 1, np.int64)  # scratch memory of one call

    def take(self, num_pages: int) -> Array | None:
        """Allocate the next pages; None if fewer are free."""
        if num_pages > self.num_free:
            return None
        pages = self._first(num_pages)
        self._head = (self._head + num_pages) % self.num_pages
        self.num_free -= num_pages
        self._is_used[pages] = True
        return pages

    def free(self, pages: Array) -> None:
        """Free pages, which may be repeated. All must be allocated (`AssertionError`)."""
        is_first_of_run = np.concatenate([[True], pages[1:] != pages[:-1]])
        pages = pages[is_first_of_run]  # most repeated pages are adjacent
        is_page = (pages >= 1) & (pages <= self.num_pages)
        is_allocated = is_page & self._is_used[np.where(is_page, pages, 0)]
        assert is_allocated.all(), f"pages {sorted(set(pages[~is_allocated].tolist()))} are not allocated"
        pages = self._first_of_each(pages)
        self._is_used[pages] = False
        self._append(pages)

    def free_pages(self) -> Array:
        return self._first(self.num_free)

    def _first(self, num_pages: int) -> Array:
        """A copy of the first pages of the ring."""
        end = self._head + num_pages
        if end <= self.num_pages:
            return self._ring[self._head : end].copy()
        return np.concatenate([self._ring[self._head :], self._ring[: end - self.num_pages]])

    def _append(self, pages: Array) -> None:
        tail = (self._head + self.num_free) % self.num_pages
        num_before_end = min(len(pages), self.num_pages - tail)
        self._ring[tail : tail + num_before_end] = pages[:num_before_end]
        self._ring[: len(pages) - num_before_end] = pages[num_before_end:]
        self.num_free += len(pages)

    def _first_of_each(self, pages: Array) -> Array:
        """Distinct pages, in the order of their first occurrence."""
        order = np.arange(len(pages))
        self._stamps[pages[::-1]] = order[::-1]  # with several values for one index, the last one remains
        return pages[self._stamps[pages] == order]
