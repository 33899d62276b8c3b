"""The optimized policies over a tree that reports its changes: how little of the queue a pass looks at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.radix_cache import RadixCache
from diptych.optimized.schedule_policy import SchedulePolicy
from diptych.shared.interfaces import RadixKey
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.tools.conformance.contracts.schedule_policy.passes import Policy
from diptych.shared.types import Req, SamplingParams


def waiting(rid: int, tokens: list[int], **fields: Any) -> Req:
    return Req(str(rid), tokens, SamplingParams(max_new_tokens=rid % 7 + 1), seed=0, **fields)


class CountingTree(RadixCache):
    num_matches = 0

    def match_prefix(self, key: RadixKey) -> Any:
        self.num_matches += 1
        return super().match_prefix(key)


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_a_pass_matches_only_who_came_and_whose_match_changed(name: str) -> None:
    tree = CountingTree(1)
    policy = SchedulePolicy(Policy("", policy=name).config(), tree)
    queue = WaitingQueue([waiting(i, [i % 10, i, 1, 2]) for i in range(100)])

    def matches_of_a_pass() -> int:
        before = tree.num_matches
        list(policy.order(queue, []).order)
        return tree.num_matches - before

    def insert(*tokens: int) -> None:
        tree.insert(RadixKey(list(tokens)), torch.arange(len(tokens)))

    assert matches_of_a_pass() == 100
    assert matches_of_a_pass() == 0
    insert(3, 99)
    assert matches_of_a_pass() == 10  # those that begin with 3
    insert(3, 23, 1, 2)
    assert matches_of_a_pass() == 1  # the others part from it before it begins
    insert(50)
    assert matches_of_a_pass() == 0
    queue.remove(queue[17])
    queue.append(waiting(100, [7]))
    assert matches_of_a_pass() == 1
    tree.evict(3)
    assert matches_of_a_pass() <= 1
    assert tree.evict(tree.evictable_size()) > 0
    assert matches_of_a_pass() == 10
    tree.reset()
    assert matches_of_a_pass() == 100


@pytest.mark.parametrize("name", ["lof", "routing-key", "dfs-weight"])
def test_a_pass_looks_at_none_that_it_is_not_asked_for(name: str) -> None:
    """Until the order is walked, no request that waited before is read."""
    queue = WaitingQueue([waiting(i, [i], routing_key="a") for i in range(50)])
    policy = SchedulePolicy(Policy("", policy=name).config(), RadixCache(1))
    expected = [req.rid for req in policy.order(queue, []).order]
    for req in queue:
        req.__class__ = Unread
    result = policy.order(queue, [])
    for req in queue:
        req.__class__ = Req
    assert [req.rid for req in result.order] == expected


class Unread(Req):
    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return super().__getattribute__(name)
        raise AssertionError(f"{name} was read")
