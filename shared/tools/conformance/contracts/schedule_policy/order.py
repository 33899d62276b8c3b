"""Clauses of the scheduling policy: each order, compared with its definition."""

from __future__ import annotations

import random
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import PrefixCache, RadixKey, SchedulePolicy
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.types import Req, SamplingParams


def cache(page_size: int = 1, name: str = "radix_cache") -> PrefixCache:
    return registry.load(name, "reference")(page_size=page_size)


def put(tree: PrefixCache, *token_lists: list[int]) -> None:
    for ids in token_lists:
        tree.insert(RadixKey(ids), torch.arange(1, len(ids) + 1))


def req(rid: str, ids: list[int] | None = None, max_new: int = 8, **fields: Any) -> Req:
    return Req(rid, ids or [1], SamplingParams(max_new_tokens=max_new), seed=0, **fields)


def rids(result: Any) -> list[str]:
    return [r.rid for r in result.order]


@contract(
    "fcfs keeps the queue's order, whatever the priorities; the queue itself is not changed.",
    EXAMPLE,
)
def fcfs_keeps_the_queue(impl: type[SchedulePolicy], case: Case) -> None:
    queue = [req("b"), req("a", priority=9), req("c")]
    expect_equal(
        "order",
        rids(impl(EngineConfig(), cache()).order(queue, [])),
        ["b", "a", "c"],
    )
    expect_equal("[r.rid for r in queue]", [r.rid for r in queue], ["b", "a", "c"])


@contract(
    "fcfs with priority scheduling: highest priority first, then the longest waiting.",
    EXAMPLE,
)
def fcfs_with_priorities(impl: type[SchedulePolicy], case: Case) -> None:
    policy = impl(EngineConfig(enable_priority_scheduling=True), cache())
    queue = [
        req("late", priority=5, queue_start_time=2.0),
        req("low", priority=1, queue_start_time=0.0),
        req("early", priority=5, queue_start_time=1.0),
    ]
    expect_equal("order", rids(policy.order(queue, [])), ["early", "late", "low"])


@contract(
    "lof: the longest output first; with priority scheduling, priority before that.",
    table("by_priority", ("plain", False), ("with priorities", True)),
)
def lof_takes_the_longest_output_first(impl: type[SchedulePolicy], case: Case) -> None:
    by_priority = case.by_priority
    config = EngineConfig(schedule_policy="lof", enable_priority_scheduling=by_priority)
    queue = [req("s", max_new=3), req("l", max_new=9), req("p", max_new=1, priority=7), req("l2", max_new=9)]
    expected = ["p", "l", "l2", "s"] if by_priority else ["l", "l2", "s", "p"]
    expect_equal("order", rids(impl(config, cache()).order(queue, [])), expected)


@contract("random is a permutation from the policy's own seeded generator.", EXAMPLE)
def random_is_a_seeded_permutation(impl: type[SchedulePolicy], case: Case) -> None:
    queue = [req(str(i)) for i in range(30)]
    orders = [
        rids(impl(EngineConfig(schedule_policy="random", random_seed=seed), cache()).order(queue, []))
        for seed in (1, 1, 2)
    ]
    expect_true("orders[0] == orders[1] != orders[2]", orders[0] == orders[1] != orders[2])
    expect_equal("sorted(orders[0], key=int)", sorted(orders[0], key=int), [str(i) for i in range(30)])
    expect_true("orders[0] != sorted(orders[0], key=int)", orders[0] != sorted(orders[0], key=int))


@contract(
    "routing-key: the most frequent key of the running batch first, ties by key, all others last.", EXAMPLE
)
def routing_key_follows_what_runs(impl: type[SchedulePolicy], case: Case) -> None:
    policy = impl(EngineConfig(schedule_policy="routing-key"), cache())
    running = [req(f"r{i}", routing_key=key) for i, key in enumerate(["x", "y", "y", "z", "z", None])]
    queue = [
        req("none"), req("x1", routing_key="x"), req("new", routing_key="w"), req("z1", routing_key="z"),
        req("y1", routing_key="y"), req("x2", routing_key="x"), req("y2", routing_key="y"),
    ]  # fmt: skip
    expect_equal(
        "order",
        rids(policy.order(queue, running)),
        ["y1", "y2", "z1", "x1", "x2", "none", "new"],
    )


@contract("lpm: the longest cached prefix first.", EXAMPLE)
def lpm_takes_the_longest_match_first(impl: type[SchedulePolicy], case: Case) -> None:
    tree = cache()
    put(tree, [1, 2, 3, 4], [5, 6])
    policy = impl(EngineConfig(schedule_policy="lpm"), tree)
    queue = [req("0", [9]), req("2", [5, 6, 7]), req("4", [1, 2, 3, 4, 5]), req("3", [1, 2, 3])]
    expect_equal("order", rids(policy.order(queue, [])), ["4", "3", "2", "0"])


@contract("lpm with more than 128 waiting is fcfs.", EXAMPLE)
def lpm_gives_up_on_a_long_queue(impl: type[SchedulePolicy], case: Case) -> None:
    tree = cache()
    put(tree, [1, 2, 3])
    policy = impl(EngineConfig(schedule_policy="lpm"), tree)
    queue = [req(str(i), [9]) for i in range(128)] + [req("match", [1, 2, 3])]
    expect_equal("order", rids(policy.order(queue, []))[0], "0")
    expect_equal("order", rids(policy.order(queue[1:], []))[0], "match")


@contract(
    "dfs-weight: the heaviest subtree first, a node's own requests after those of its children.", EXAMPLE
)
def dfs_weight_order(impl: type[SchedulePolicy], case: Case) -> None:
    tree = cache()
    put(tree, [1, 2], [1, 2, 3, 4], [1, 2, 5, 6], [7, 8])
    policy = impl(EngineConfig(schedule_policy="dfs-weight"), tree)
    queue = [
        req("7a", [7, 8, 0]), req("12", [1, 2]), req("root", [9]), req("34", [1, 2, 3, 4]),
        req("56a", [1, 2, 5, 6, 1]), req("56b", [1, 2, 5, 6]),
    ]  # fmt: skip
    expect_equal(
        "order",
        rids(policy.order(queue, [])),
        ["56a", "56b", "34", "12", "7a", "root"],
    )


@contract(
    "dfs-weight: of two equally heavy children, the one with the longest waiting request first.", EXAMPLE
)
def dfs_weight_ties(impl: type[SchedulePolicy], case: Case) -> None:
    tree = cache()
    put(tree, [1, 2], [3, 4], [5, 6])
    policy = impl(EngineConfig(schedule_policy="dfs-weight"), tree)
    for families in ([1, 3, 5], [5, 3, 1], [3, 5, 1]):
        queue = [req(str(first), [first, first + 1, 9]) for first in families]
        expect_equal("order", rids(policy.order(queue, [])), [str(first) for first in families])


@contract(
    "Cache-aware policies with the cache disabled are fcfs.", grid("{policy}", policy=("lpm", "dfs-weight"))
)
def cache_aware_without_a_cache(impl: type[SchedulePolicy], case: Case) -> None:
    policy = impl(EngineConfig(schedule_policy=case.policy), cache(name="chunk_cache"))
    queue = [req(str(i), [i % 3 + 1] * 40) for i in range(6)]
    result = policy.order(queue, [])
    expect_equal("order", rids(result), [str(i) for i in range(6)])
    expect_true("not deprioritized", not result.deprioritized)


@contract(
    "A request that shares a prefix with an earlier request of the step goes last and is deprioritized.",
    grid("{policy}, page {page_size}", policy=("lpm", "dfs-weight"), page_size=(1, 4)),
)
def in_batch_prefixes_wait(impl: type[SchedulePolicy], case: Case) -> None:
    page_size = case.page_size
    policy = impl(EngineConfig(schedule_policy=case.policy, page_size=page_size), cache(page_size))
    prefix = list(range(1, 33))
    queue = [
        req("first", [*prefix, 40]),
        req("second", [*prefix, 41]),
        req("31 shared", [*prefix[:31], 50]),
        req("other namespace", [*prefix, 42], extra_key="b"),
        req("last", [60, 61]),
    ]
    result = policy.order(queue, [])
    expect_equal("deprioritized", result.deprioritized, {"second"})
    expect_equal("order[-1]", rids(result)[-1], "second")


@contract("A request is not deprioritized for a prefix that is cached.", EXAMPLE)
def a_prefix_in_the_cache_needs_no_waiting(impl: type[SchedulePolicy], case: Case) -> None:
    tree = cache()
    prefix = list(range(1, 34))
    put(tree, prefix)
    policy = impl(EngineConfig(schedule_policy="lpm"), tree)
    result = policy.order([req("a", [*prefix, 40]), req("b", [*prefix, 41])], [])
    expect_true("not deprioritized", not result.deprioritized)


@contract("Every policy returns a permutation of the queue.", EXAMPLE)
def order_is_always_a_permutation(impl: type[SchedulePolicy], case: Case) -> None:
    rng = random.Random(0)
    for name in ("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"):
        tree = cache()
        for _ in range(20):
            put(tree, [rng.randint(1, 3) for _ in range(rng.randint(1, 12))])
        queue = [
            req(str(i), [rng.randint(1, 3) for _ in range(rng.randint(1, 50))], routing_key=rng.choice("xyz"))
            for i in range(50)
        ]
        result = impl(EngineConfig(schedule_policy=name), tree).order(queue, queue[:10])
        expect_equal(f"the requests of {name}", sorted(rids(result), key=int), [str(i) for i in range(50)])
