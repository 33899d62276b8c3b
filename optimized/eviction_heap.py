"""The leaves of a tree in the order in which they are evicted, kept between evictions.

What a leaf is ordered by only ever grows, so an entry made earlier comes no later than it should. Entries are
left alone while nodes are used, locked or grow children, and put right when they come to the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimized.radix_cache import TreeNode


class EvictionHeap:
    def __init__(self, order: Callable[[TreeNode], tuple[int, ...]]) -> None:
        self.order = order
        self.clear()

    def clear(self) -> None:
        # An entry for every unlocked leaf, with what it was ordered by at some time; perhaps for other nodes.
        # The node id only breaks ties, so that nodes themselves are never compared.
        self.entries: list[tuple[tuple[int, ...], int, TreeNode]] = []

    def add(self, node: TreeNode) -> None:
        """Give an evictable leaf its entry, if it has none."""
        if not node.is_queued and _is_evictable(node):
            heapq.heappush(self.entries, (self.order(node), node.node_id, node))
            node.is_queued = True

    def pop(self) -> TreeNode | None:
        """The leaf that goes next, without its entry."""
        while self.entries:
            order, _, node = self.entries[0]
            if not _is_evictable(node):
                heapq.heappop(self.entries)
                node.is_queued = False  # until it is a leaf and unlocked again
            elif order != (order_now := self.order(node)):
                heapq.heapreplace(self.entries, (order_now, node.node_id, node))
            else:
                heapq.heappop(self.entries)
                return node
        return None


def _is_evictable(node: TreeNode) -> bool:
    """The root is not, nor is what was discarded: neither has a parent."""
    return not node.children and node.lock_ref == 0 and node.parent is not None
