"""RadixCache against a model without a tree: flat dictionaries of prefixes, all searched by brute force.

The model keeps the slots of every cached page under the page's whole prefix, and for every node the prefix
at which it ends. A prefix begins where the longest shorter one ends; a leaf is one that none extends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.interfaces.prefix_cache import RadixKey

from .harness import IMPLS, World

Prefix = tuple[str | None, tuple[Any, ...]]  # namespace, tokens or bigrams


@dataclass
class End:
    """What the model knows of the node that ends at some prefix."""

    created: int
    accessed: int
    priority: int
    hits: int = 0


def extends(longer: Prefix, shorter: Prefix) -> bool:
    return longer[0] == shorter[0] and longer[1][: len(shorter[1])] == shorter[1]


class Model:
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

    def walk(self, key: Prefix) -> Prefix:
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
        matched = self.walk(key)
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

    def start(self, end: Prefix) -> int:
        return max((len(e[1]) for e in self.ends if e != end and extends(end, e)), default=0)

    def order(self, end: Prefix) -> tuple[int, ...]:
        data = self.ends[end]
        return {
            "lru": (data.accessed,),
            "lfu": (data.hits, data.accessed),
            "fifo": (data.created,),
            "priority": (data.priority, data.accessed),
        }[self.policy]

    def evict(self, num_tokens: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_tokens:
            leaves = [
                end
                for end in self.ends
                if self.lock_ref(end) == 0 and not any(e != end and extends(e, end) for e in self.ends)
            ]
            if not leaves:
                break
            victim = min(leaves, key=self.order)
            for page in self.pages(victim):
                if len(page[1]) > self.start(victim):
                    freed += self.page_slots.pop(page)
            del self.ends[victim]
        return freed

    def sizes(self) -> tuple[int, int]:
        locked = sum(self.lock_ref(page) > 0 for page in self.page_slots)
        return (len(self.page_slots) - locked) * self.page_size, locked * self.page_size


class Comparison:
    """One cache and one model through the same calls."""

    def __init__(self, impl: str, page_size: int, policy: str, is_bigram: bool) -> None:
        world = World(impl, page_size, num_pages=48, eviction_policy=policy, is_bigram=is_bigram)
        self.cache, self.allocator = world.cache, world.allocator
        self.model = Model(page_size, policy)
        self.is_bigram = is_bigram
        self.locked: list[Any] = []

    def keys(self, tokens: Sequence[int], space: str | None) -> tuple[RadixKey, Prefix]:
        entries = pairwise(tokens) if self.is_bigram else tokens
        return RadixKey(list(tokens), space, self.is_bigram), (space, tuple(entries))

    def match(self, tokens: Sequence[int], space: str | None, lock: bool) -> None:
        key, prefix = self.keys(tokens, space)
        result = self.cache.match_prefix(key)
        matched = self.model.walk(prefix)
        assert result.device_indices.tolist() == self.model.slots(matched)
        if lock:
            self.cache.inc_lock_ref(result.last_node)
            self.locked.append(result.last_node)
            self.model.locks.append(matched)

    def unlock(self, index: int) -> None:
        if self.locked:
            self.cache.dec_lock_ref(self.locked.pop(index % len(self.locked)))
            self.model.locks.pop(index % len(self.model.locks))

    def insert(self, tokens: Sequence[int], space: str | None, priority: int) -> None:
        key, prefix = self.keys(tokens, space)
        num_tokens = len(self.model.pages(prefix)) * self.model.page_size
        if num_tokens > self.allocator.available_size():
            self.evict(num_tokens)
        value = self.allocator.alloc(num_tokens)
        if value is None:
            return
        result = self.cache.insert(key, value, priority)
        assert result.prefix_len == self.model.insert(prefix, value.tolist(), priority)
        self.allocator.free(value[: result.prefix_len])

    def evict(self, num_tokens: int) -> None:
        free = set(self.allocator.free_slots().tolist())
        num_evicted = self.cache.evict(num_tokens)
        expected = self.model.evict(num_tokens)
        assert num_evicted == len(expected)
        assert set(self.allocator.free_slots().tolist()) - free == set(expected)

    def check(self) -> None:
        prefixes: dict[int, tuple[Any, ...]] = {0: ()}
        ends = set()
        for node in self.cache.nodes():
            prefixes[node.node_id] = (*prefixes[node.parent_id], *node.key)
            end = (node.extra_key, prefixes[node.node_id])
            ends.add(end)
            assert node.lock_ref == self.model.lock_ref(end)
            assert node.slots == self.model.slots(end)[-len(node.key) :]
        assert ends == set(self.model.ends)
        assert (self.cache.evictable_size(), self.cache.protected_size()) == self.model.sizes()
        num_cached = len(self.model.page_slots) * self.model.page_size
        assert self.allocator.available_size() + num_cached == self.allocator.size


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority"])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_agrees_with_the_model(impl: str, page_size: int, policy: str, data: st.DataObject) -> None:
    """CASES A1, A4."""
    # Few different tokens: keys share prefixes and part in all places.
    tokens = st.lists(st.integers(0, 1), max_size=4 * page_size + 3)
    space = st.sampled_from([None, None, "a", "b"])
    comparison = Comparison(impl, page_size, policy, is_bigram=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["insert", "insert", "insert", "match", "lock", "unlock", "evict"])):
            case "insert":
                comparison.insert(data.draw(tokens), data.draw(space), data.draw(st.integers(-1, 2)))
            case "match":
                comparison.match(data.draw(tokens), data.draw(space), lock=False)
            case "lock":
                comparison.match(data.draw(tokens), data.draw(space), lock=True)
            case "unlock":
                comparison.unlock(data.draw(st.integers(0, 20)))
            case "evict":
                comparison.evict(data.draw(st.integers(0, 12)))
        comparison.check()
    while comparison.locked:
        comparison.unlock(0)
    while comparison.model.ends:  # one leaf at a time: the whole order is compared
        comparison.evict(1)
        comparison.check()
    assert comparison.allocator.available_size() == comparison.allocator.size
