"""The leaves of a tree in eviction order, kept between evictions.

A leaf's entry does not change while the leaf is used, locked, or grows children. It is corrected when it
reaches the top. That suffices for policies whose order value only grows with use, because an older entry is
then never too late in the order. Under mru the value falls with use, so each use adds an entry, which
precedes the older entries of the same leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from diptych.optimized.array_tree import TreeNode

MIN_LIMIT = 1024
"""Entries that the heap may hold before outdated ones are searched for."""


class EvictionHeap:
    def __init__(self, order: Callable[[TreeNode], tuple[int, ...]], falls_with_use: bool = False) -> None:
        self.order = order
        self.falls_with_use = falls_with_use
        self.clear()

    def clear(self) -> None:
        # (order value when the entry was made, node id, node): at least one entry for each unlocked leaf, and
        # perhaps entries for other nodes. The node id breaks ties: nodes are never compared.
        self.entries: list[tuple[tuple[int, ...], int, TreeNode]] = []
        self._limit = MIN_LIMIT

    def add(self, node: TreeNode) -> None:
        """Make an entry for an evictable leaf that has none."""
        if not node.is_queued and _is_evictable(node):
            self._push(node)

    def used(self, node: TreeNode) -> None:
        """Call it after each access of a leaf."""
        if self.falls_with_use and node.is_queued:
            self._push(node)
            if len(self.entries) > self._limit:
                self._drop_outdated()

    def pop(self) -> TreeNode | None:
        """The leaf that is evicted next. Its entry is removed."""
        while self.entries:
            order, _, node = self.entries[0]
            if not _is_evictable(node):
                heapq.heappop(self.entries)
                node.is_queued = False  # until it is an unlocked leaf again
            elif order < (order_now := self.order(node)):
                heapq.heapreplace(self.entries, (order_now, node.node_id, node))
            else:
                heapq.heappop(self.entries)
                return node
        return None

    def _push(self, node: TreeNode) -> None:
        heapq.heappush(self.entries, (self.order(node), node.node_id, node))
        node.is_queued = True

    def _drop_outdated(self) -> None:
        self.entries = [entry for entry in self.entries if entry[0] == self.order(entry[2])]
        heapq.heapify(self.entries)
        self._limit = 2 * len(self.entries) + MIN_LIMIT


def _is_evictable(node: TreeNode) -> bool:
    """The root has no parent, and neither has a removed node."""
    return not node.children and node.lock_ref == 0 and node.parent is not None
