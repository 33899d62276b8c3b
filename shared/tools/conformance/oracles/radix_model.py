"""A model of the prefix cache without a tree: flat dictionaries of prefixes, searched by brute force.

The model keeps the slots of every cached page under the page's whole prefix, and for every node the prefix at
which it ends. A node begins where the longest shorter prefix ends. It is a leaf if no other prefix extends
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Prefix = tuple[str | None, tuple[Any, ...]]  # namespace, tokens or bigrams


@dataclass
class End:
    """The model's data of the node that ends at a prefix."""

    created: int
    accessed: int
    priority: int
    hits: int = 0


def extends(longer: Prefix, shorter: Prefix) -> bool:
    return longer[0] == shorter[0] and longer[1][: len(shorter[1])] == shorter[1]


class FlatCache:
    """Predicts the results of a `PrefixCache`. A node is identified by the prefix at which it ends."""

    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size, self.policy = page_size, policy
        self.page_slots: dict[Prefix, list[int]] = {}
        self.ends: dict[Prefix, End] = {}
        self.locks: list[Prefix] = []
        self.now = 0

    def pages(self, key: Prefix) -> list[Prefix]:
        space, entries = key
        p = self.page_size
        return [(space, entries[:end]) for end in range(p, len(entries) // p * p + 1, p)]

    def match(self, key: Prefix) -> Prefix:
        """The longest cached prefix. From then on a node ends there."""
        self.now += 1
        matched: Prefix = (key[0], ())
        for page in self.pages(key):
            if page in self.page_slots:
                matched = page
        if matched[1] and matched not in self.ends:
            lower = min((end for end in self.ends if extends(end, matched)), key=lambda end: len(end[1]))
            self.ends[matched] = replace(self.ends[lower])
        for end, data in self.ends.items():
            if extends(matched, end):
                data.accessed = self.now
                data.hits += 1
        return matched

    def slots(self, key: Prefix) -> list[int]:
        return [slot for page in self.pages(key) for slot in self.page_slots[page]]

    def insert(self, key: Prefix, slots: list[int], priority: int) -> int:
        matched = self.match(key)
        for end, data in self.ends.items():
            if extends(matched, end):
                data.priority = max(data.priority, priority)
        pages = self.pages(key)
        for page in pages:
            length = len(page[1])
            self.page_slots.setdefault(page, slots[length - self.page_size : length])
        if pages and pages[-1] != matched:
            self.ends[pages[-1]] = End(self.now, self.now, priority)
        return len(matched[1])

    def lock_ref(self, prefix: Prefix) -> int:
        return sum(extends(lock, prefix) for lock in self.locks)

    def evict(self, num_tokens: int) -> list[int]:
        """The slots that are freed."""
        freed: list[int] = []
        while len(freed) < num_tokens:
            leaves = [
                end
                for end in self.ends
                if self.lock_ref(end) == 0 and not any(e != end and extends(e, end) for e in self.ends)
            ]
            if not leaves:
                break
            victim = min(leaves, key=self._order)
            start = self._start(victim)
            for page in self.pages(victim):
                if len(page[1]) > start:
                    freed += self.page_slots.pop(page)
            del self.ends[victim]
        return freed

    def discard(self, key: Prefix, start: int) -> list[int]:
        """The slots that are freed."""
        matched = self.match(key)
        path = sorted((end for end in self.ends if extends(matched, end)), key=lambda end: len(end[1]))
        for end in path:
            if self._start(end) >= start and self.lock_ref(end) == 0:
                gone = [page for page in self.page_slots if self._is_at_or_below(page, end)]
                self.ends = {e: data for e, data in self.ends.items() if not extends(e, end)}
                return [slot for page in gone for slot in self.page_slots.pop(page)]
        return []

    def sizes(self) -> tuple[int, int]:
        """Evictable and protected tokens."""
        locked = sum(self.lock_ref(page) > 0 for page in self.page_slots)
        return (len(self.page_slots) - locked) * self.page_size, locked * self.page_size

    def _is_at_or_below(self, page: Prefix, end: Prefix) -> bool:
        """Whether the page is in the node that ends there, or in one below it."""
        return extends(page, end) or (extends(end, page) and len(page[1]) > self._start(end))

    def _start(self, end: Prefix) -> int:
        return max((len(e[1]) for e in self.ends if e != end and extends(end, e)), default=0)

    def _order(self, end: Prefix) -> tuple[int, ...]:
        data = self.ends[end]
        return {
            "lru": (data.accessed,),
            "lfu": (data.hits, data.accessed),
            "fifo": (data.created,),
            "mru": (-data.accessed,),
            "filo": (-data.created,),
            "slru": (int(data.hits > 1), data.accessed),
            "priority": (data.priority, data.accessed),
        }[self.policy]
