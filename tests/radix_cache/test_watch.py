"""A watched cache reports every change of its tree, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from diptych.optimized.radix_cache import RadixCache
from diptych.shared.interfaces import CacheWatcher, RadixKey


class Mirror(CacheWatcher):
    """The tree's nodes as reported to the watcher: each with its parent."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        cache.watch(self)
        self.reset()

    def inserted(self, parent: Any, key: Hashable) -> None:
        (leaf,) = [child for child_key, child in parent.children.items() if child_key == key]
        self.parents[leaf] = parent

    def split(self, upper: Any, lower: Any) -> None:
        self.parents[upper] = self.parents[lower]
        self.parents[lower] = upper

    def removed(self, leaf: Any) -> None:
        assert leaf not in self.parents.values(), "it has children"
        del self.parents[leaf]

    def reset(self) -> None:
        self.parents: dict[Any, Any] = {}

    def check(self) -> None:
        reported = {(node.node_id, above.node_id) for node, above in self.parents.items()}
        assert reported == {(node.node_id, node.parent_id) for node in self.cache.nodes()}
        for node, above in self.parents.items():
            assert self.cache.parent(node) is above


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_watcher_knows_the_tree(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = RadixCache(page_size)
    mirrors = [Mirror(cache)]
    assert cache.parent(cache.root) is None
    for step in range(300):
        tokens = rng.choices([0, 1], k=rng.randint(0, 5 * page_size))
        key = RadixKey(tokens, rng.choice([None, "a"]), is_bigram=rng.random() < 0.2)
        kind = rng.choices(["insert", "match", "evict", "discard", "reset"], [6, 3, 2, 0.5, 0.1])[0]
        if kind == "insert":
            cache.insert(key, torch.arange(len(key)))
        elif kind == "match":
            cache.match_prefix(key)
        elif kind == "evict":
            cache.evict(rng.randint(1, 8))
        elif kind == "discard":
            cache.discard(key, rng.choice([0, page_size]))
        else:
            cache.reset()
            mirrors.append(Mirror(cache))
        mirrors[step % len(mirrors)].check()
    for mirror in mirrors:
        mirror.check()
