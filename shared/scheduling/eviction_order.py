"""Eviction policies: what the leaves of a prefix cache are sorted by. The smallest is evicted first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class EvictableNode(Protocol):
    creation_time: int
    last_access_time: int
    hit_count: int  # matches and inserts through the node since it was made
    priority: int


SLRU_NUM_HITS = 2
"""From so many hits on, slru treats a node as one that is used again and again."""

EVICTION_ORDER: dict[str, Callable[[EvictableNode], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_access_time,),
    "lfu": lambda node: (node.hit_count, node.last_access_time),
    "fifo": lambda node: (node.creation_time,),
    "mru": lambda node: (-node.last_access_time,),
    "filo": lambda node: (-node.creation_time,),
    "priority": lambda node: (node.priority, node.last_access_time),
    "slru": lambda node: (node.hit_count >= SLRU_NUM_HITS, node.last_access_time),
}


def eviction_order(policy: str) -> Callable[[EvictableNode], tuple[int, ...]]:
    if policy not in EVICTION_ORDER:
        raise ValueError(f"eviction_policy {policy!r} is none of {', '.join(EVICTION_ORDER)}")
    return EVICTION_ORDER[policy]
