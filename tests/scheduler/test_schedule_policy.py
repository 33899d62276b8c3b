"""Each policy's order, against its definition."""

from __future__ import annotations

import random

import pytest
import torch

from shared import registry
from shared.config import EngineConfig
from shared.interfaces import PrefixCache, RadixKey, SchedulePolicy
from shared.types import Req, SamplingParams


@pytest.fixture(params=list(registry.IMPLEMENTATIONS["schedule_policy"]))
def impl(request: pytest.FixtureRequest) -> type[SchedulePolicy]:
    return registry.load("schedule_policy", request.param)


def cache(page_size: int = 1, name: str = "radix_cache") -> PrefixCache:
    return registry.load(name, "reference")(page_size=page_size)


def put(tree: PrefixCache, *token_lists: list[int]) -> None:
    for ids in token_lists:
        tree.insert(RadixKey(ids), torch.arange(1, len(ids) + 1))


def req(rid: str, ids: list[int] | None = None, max_new: int = 8, **fields: object) -> Req:
    return Req(rid, ids or [1], SamplingParams(max_new_tokens=max_new), seed=0, **fields)


def rids(result: object) -> list[str]:
    return [r.rid for r in result.order]


def test_fcfs_keeps_the_queue(impl: type[SchedulePolicy]) -> None:
    queue = [req("b"), req("a", priority=9), req("c")]
    assert rids(impl(EngineConfig(), cache()).order(queue, [])) == ["b", "a", "c"]
    assert [r.rid for r in queue] == ["b", "a", "c"]


def test_fcfs_with_priorities(impl: type[SchedulePolicy]) -> None:
    policy = impl(EngineConfig(enable_priority_scheduling=True), cache())
    queue = [
        req("late", priority=5, queue_start_time=2.0),
        req("low", priority=1, queue_start_time=0.0),
        req("early", priority=5, queue_start_time=1.0),
    ]
    assert rids(policy.order(queue, [])) == ["early", "late", "low"]


@pytest.mark.parametrize("by_priority", [False, True])
def test_lof_takes_the_longest_output_first(impl: type[SchedulePolicy], by_priority: bool) -> None:
    config = EngineConfig(schedule_policy="lof", enable_priority_scheduling=by_priority)
    queue = [req("s", max_new=3), req("l", max_new=9), req("p", max_new=1, priority=7), req("l2", max_new=9)]
    expected = ["p", "l", "l2", "s"] if by_priority else ["l", "l2", "s", "p"]
    assert rids(impl(config, cache()).order(queue, [])) == expected


def test_random_is_a_seeded_permutation(impl: type[SchedulePolicy]) -> None:
    queue = [req(str(i)) for i in range(30)]
    orders = [
        rids(impl(EngineConfig(schedule_policy="random", random_seed=seed), cache()).order(queue, []))
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0], key=int) == [str(i) for i in range(30)]
    assert orders[0] != sorted(orders[0], key=int)


def test_routing_key_follows_what_runs(impl: type[SchedulePolicy]) -> None:
    policy = impl(EngineConfig(schedule_policy="routing-key"), cache())
    running = [req(f"r{i}", routing_key=key) for i, key in enumerate(["x", "y", "y", "z", "z", None])]
    queue = [
        req("none"), req("x1", routing_key="x"), req("new", routing_key="w"), req("z1", routing_key="z"),
        req("y1", routing_key="y"), req("x2", routing_key="x"), req("y2", routing_key="y"),
    ]  # fmt: skip
    assert rids(policy.order(queue, running)) == ["y1", "y2", "z1", "x1", "x2", "none", "new"]


def test_lpm_takes_the_longest_match_first(impl: type[SchedulePolicy]) -> None:
    tree = cache()
    put(tree, [1, 2, 3, 4], [5, 6])
    policy = impl(EngineConfig(schedule_policy="lpm"), tree)
    queue = [req("0", [9]), req("2", [5, 6, 7]), req("4", [1, 2, 3, 4, 5]), req("3", [1, 2, 3])]
    assert rids(policy.order(queue, [])) == ["4", "3", "2", "0"]


def test_lpm_gives_up_on_a_long_queue(impl: type[SchedulePolicy]) -> None:
    tree = cache()
    put(tree, [1, 2, 3])
    policy = impl(EngineConfig(schedule_policy="lpm"), tree)
    queue = [req(str(i), [9]) for i in range(128)] + [req("match", [1, 2, 3])]
    assert rids(policy.order(queue, []))[0] == "0"
    assert rids(policy.order(queue[1:], []))[0] == "match"


def test_dfs_weight_goes_into_the_heaviest_subtree_and_its_own_come_last(impl: type[SchedulePolicy]) -> None:
    tree = cache()
    put(tree, [1, 2], [1, 2, 3, 4], [1, 2, 5, 6], [7, 8])
    policy = impl(EngineConfig(schedule_policy="dfs-weight"), tree)
    queue = [
        req("7a", [7, 8, 0]), req("12", [1, 2]), req("root", [9]), req("34", [1, 2, 3, 4]),
        req("56a", [1, 2, 5, 6, 1]), req("56b", [1, 2, 5, 6]),
    ]  # fmt: skip
    assert rids(policy.order(queue, [])) == ["56a", "56b", "34", "12", "7a", "root"]


@pytest.mark.parametrize("policy_name", ["lpm", "dfs-weight"])
def test_cache_aware_policies_without_a_cache_are_fcfs(impl: type[SchedulePolicy], policy_name: str) -> None:
    policy = impl(EngineConfig(schedule_policy=policy_name), cache(name="chunk_cache"))
    queue = [req(str(i), [i % 3 + 1] * 40) for i in range(6)]
    result = policy.order(queue, [])
    assert rids(result) == [str(i) for i in range(6)]
    assert not result.deprioritized


@pytest.mark.parametrize("policy_name", ["lpm", "dfs-weight"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_who_shares_a_prefix_about_to_be_computed_waits(
    impl: type[SchedulePolicy], policy_name: str, page_size: int
) -> None:
    policy = impl(EngineConfig(schedule_policy=policy_name, page_size=page_size), cache(page_size))
    prefix = list(range(1, 33))
    queue = [
        req("first", [*prefix, 40]),
        req("second", [*prefix, 41]),
        req("31 shared", [*prefix[:31], 50]),
        req("other namespace", [*prefix, 42], extra_key="b"),
        req("last", [60, 61]),
    ]
    result = policy.order(queue, [])
    assert result.deprioritized == {"second"}
    assert rids(result)[-1] == "second"


def test_a_prefix_in_the_cache_needs_no_waiting(impl: type[SchedulePolicy]) -> None:
    tree = cache()
    prefix = list(range(1, 34))
    put(tree, prefix)
    policy = impl(EngineConfig(schedule_policy="lpm"), tree)
    result = policy.order([req("a", [*prefix, 40]), req("b", [*prefix, 41])], [])
    assert not result.deprioritized


def test_order_is_always_a_permutation(impl: type[SchedulePolicy]) -> None:
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
        assert sorted(rids(result), key=int) == [str(i) for i in range(50)], name
