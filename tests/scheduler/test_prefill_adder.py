"""The adder's budgets, clause by clause."""

from __future__ import annotations

import pytest
import torch

from shared import registry
from shared.interfaces import AddReqResult, PrefillAdder, PrefillBudget, RadixKey
from shared.types import Req, SamplingParams


@pytest.fixture(params=list(registry.IMPLEMENTATIONS["prefill_adder"]))
def impl(request: pytest.FixtureRequest) -> type[PrefillAdder]:
    return registry.load("prefill_adder", request.param)


class Setup:
    """Pools and a tree, and an adder over them."""

    def __init__(self, impl: type[PrefillAdder], pool: int = 1024, page_size: int = 1) -> None:
        self.impl = impl
        self.page_size = page_size
        pools = registry.load("memory_pool", "reference")
        self.allocator = pools.TokenToKVPoolAllocator(pool, page_size, "cpu")
        rows = pools.ReqToTokenPool(8, 256, "cpu")
        self.tree = registry.load("radix_cache", "reference")(page_size, self.allocator, rows)

    def adder(self, running: list[Req] | None = None, **budget: object) -> PrefillAdder:
        values = {
            "max_prefill_tokens": 10_000,
            "chunked_prefill_size": None,
            "new_token_ratio": 0.5,
            **budget,
        }
        return self.impl(
            PrefillBudget(page_size=self.page_size, **values), self.tree, self.allocator, running or []
        )

    def cache(self, ids: list[int]) -> None:
        self.tree.insert(RadixKey(ids), self.allocator.alloc(len(ids)))


def req(num_prompt: int, max_new: int = 10, num_output: int = 0, rid: str = "r", **fields: object) -> Req:
    params = SamplingParams(max_new_tokens=max_new)
    return Req(rid, list(range(1, num_prompt + 1)), params, 0, output_ids=[7] * num_output, **fields)


def running(max_new: int = 10, num_output: int = 1, **fields: object) -> Req:
    made = req(5, max_new, num_output, **fields)
    made.kv_committed_len = made.kv_allocated_len = 5 + num_output - 1
    return made


def test_initial_budgets(impl: type[PrefillAdder]) -> None:
    """Running requests reserve what they may still produce, clipped and scaled."""
    setup = Setup(impl, pool=10_000)
    adder = setup.adder(
        [running(101, 1), running(100_000, 1)],
        max_prefill_tokens=500,
        chunked_prefill_size=64,
        num_mixed_decode_tokens=2,
    )
    assert adder.rem_total_tokens == 10_000 - 2 - 50 - 2048
    assert adder.rem_input_tokens == 498
    assert adder.rem_chunk_tokens == 62


def test_added_whole(impl: type[PrefillAdder]) -> None:
    setup = Setup(impl)
    adder = setup.adder(chunked_prefill_size=100)
    added = req(20, 30)
    assert adder.add_one_req(added) is AddReqResult.CONTINUE
    assert adder.can_run_list == [added]
    assert added.fill_ids == added.origin_input_ids
    assert (added.extend_input_len, adder.new_chunked_req) == (20, None)
    assert adder.rem_total_tokens == 1024 - 20 - 30
    assert (adder.rem_input_tokens, adder.rem_chunk_tokens) == (9980, 80)


def test_a_cached_prefix_is_locked_and_not_paid_for(impl: type[PrefillAdder]) -> None:
    setup = Setup(impl)
    setup.cache(list(range(1, 16)))
    adder = setup.adder()
    added = req(20, 30)
    adder.add_one_req(added)
    assert (len(added.prefix_indices), added.cache_protected_len, added.extend_input_len) == (15, 15, 5)
    assert setup.tree.protected_size() == 15
    assert adder.rem_total_tokens == 1024 - 15 - 5 - 30


def test_prefix_is_capped_where_prompt_logprobs_begin(impl: type[PrefillAdder]) -> None:
    setup = Setup(impl)
    setup.cache(list(range(1, 21)))
    params = SamplingParams(return_logprob=True, logprob_start_len=8)
    added = Req("r", list(range(1, 21)), params, 0)
    setup.adder().add_one_req(added)
    assert len(added.prefix_indices) == 7


def test_pages_are_charged_whole(impl: type[PrefillAdder]) -> None:
    setup = Setup(impl, page_size=16)
    adder = setup.adder(chunked_prefill_size=64)
    adder.add_one_req(req(17, 3))
    assert adder.rem_total_tokens == 1024 - 32 - 3
    assert adder.rem_chunk_tokens == 32


def test_no_room_for_the_output_is_no_token(impl: type[PrefillAdder]) -> None:
    """extension + output >= rem_total; one token less fits."""
    setup = Setup(impl, pool=100)
    for max_new, expected in ((76, AddReqResult.NO_TOKEN), (75, AddReqResult.CONTINUE)):
        adder = setup.adder([running(9, 1)])  # reserves 4
        waiting = req(20, max_new)
        assert adder.add_one_req(waiting) is expected
        assert bool(adder.can_run_list) is (expected is AddReqResult.CONTINUE)


def test_locking_the_prefix_counts(impl: type[PrefillAdder]) -> None:
    """CASES A6: before the lock 60 tokens are free or evictable, after it 20."""
    setup = Setup(impl, pool=60)
    setup.cache(list(range(1, 41)))
    adder = setup.adder([running(2, 1)])
    waiting = req(45, 20)
    assert adder.add_one_req(waiting) is AddReqResult.NO_TOKEN
    assert setup.tree.protected_size() == 0
    assert waiting.last_node is None
    assert adder.can_run_list == []


def test_a_lone_request_needs_only_its_own_tokens(impl: type[PrefillAdder]) -> None:
    setup = Setup(impl, pool=32)
    assert setup.adder().add_one_req(req(32, 1)) is AddReqResult.CONTINUE
    assert setup.adder([running(2, 1)]).add_one_req(req(32, 1)) is AddReqResult.NO_TOKEN


def test_the_first_request_passes_the_input_budget_and_the_second_does_not(impl: type[PrefillAdder]) -> None:
    adder = Setup(impl).adder(max_prefill_tokens=50)
    assert adder.add_one_req(req(80, rid="a")) is AddReqResult.CONTINUE
    assert adder.add_one_req(req(5, rid="b")) is AddReqResult.OTHER
    adder = Setup(impl).adder(max_prefill_tokens=50)
    assert adder.add_one_req(req(30, rid="a")) is AddReqResult.CONTINUE
    assert adder.add_one_req(req(19, rid="b")) is AddReqResult.CONTINUE
    assert adder.add_one_req(req(1, rid="c")) is AddReqResult.OTHER


@pytest.mark.parametrize(("page_size", "chunk", "first"), [(1, 7, 7), (4, 7, 4), (4, 8, 8), (16, 31, 16)])
def test_a_long_prompt_is_cut_to_whole_pages(
    impl: type[PrefillAdder], page_size: int, chunk: int, first: int
) -> None:
    setup = Setup(impl, page_size=page_size)
    adder = setup.adder(chunked_prefill_size=chunk)
    waiting = req(100, 30)
    assert adder.add_one_req(waiting) is AddReqResult.CONTINUE
    assert adder.new_chunked_req is waiting
    assert waiting.fill_ids == waiting.origin_input_ids[:first]
    assert adder.rem_total_tokens == 1024 - first  # a chunk reserves no output
    assert adder.add_one_req(req(page_size + chunk, rid="next")) is AddReqResult.OTHER


def chunked(num_computed: int, num_prompt: int = 100, max_new: int = 30) -> Req:
    made = req(num_prompt, max_new)
    made.prefix_indices = torch.arange(num_computed)
    return made


def test_a_chunked_request_goes_on_and_ends(impl: type[PrefillAdder]) -> None:
    setup = Setup(impl)
    waiting = chunked(90)
    adder = setup.adder(chunked_prefill_size=7)
    assert adder.add_chunked_req(waiting) is waiting
    assert len(waiting.fill_ids) == 97
    waiting.prefix_indices = torch.arange(97)
    adder = setup.adder(chunked_prefill_size=7)
    assert adder.add_chunked_req(waiting) is None
    assert len(waiting.fill_ids) == 100
    assert adder.rem_total_tokens == 1024 - 3 - 30
    assert adder.rem_chunk_tokens == 4


@pytest.mark.parametrize("num_mixed", [8, 9])
def test_a_chunked_request_without_budget_is_parked(impl: type[PrefillAdder], num_mixed: int) -> None:
    """CASES B10: decode tokens of a mixed batch may take the whole chunk, or more."""
    adder = Setup(impl).adder(chunked_prefill_size=8, num_mixed_decode_tokens=num_mixed)
    waiting = chunked(40)
    assert adder.add_chunked_req(waiting) is waiting
    assert adder.can_run_list == []


def test_a_chunked_request_takes_no_more_memory_than_there_is(impl: type[PrefillAdder]) -> None:
    setup = Setup(impl, pool=64, page_size=4)
    setup.allocator.alloc(56)
    adder = setup.adder(chunked_prefill_size=32)
    waiting = chunked(40)
    assert adder.add_chunked_req(waiting) is waiting
    assert waiting.extend_input_len == 8
    setup.allocator.alloc(8)
    assert setup.adder(chunked_prefill_size=32).add_chunked_req(chunked(40)) is not None


class TestPreemption:
    def test_least_important_and_latest_first_as_few_as_suffice(self, impl: type[PrefillAdder]) -> None:
        setup = Setup(impl, pool=60)
        setup.allocator.alloc(60)
        victims = [
            running(41, 21, rid="old", priority=1, queue_start_time=1.0),
            running(41, 21, rid="new", priority=1, queue_start_time=2.0),
            running(41, 21, rid="less", priority=0, queue_start_time=0.0),
            running(41, 21, rid="close", priority=15, queue_start_time=0.0),
        ]
        adder = setup.adder(victims, new_token_ratio=0.0)
        chosen = adder.preempt_to_schedule(req(20, 15, priority=20), min_priority_gap=10)
        assert [v.rid for v in chosen] == ["less", "new"]

    def test_all_or_nothing(self, impl: type[PrefillAdder]) -> None:
        setup = Setup(impl, pool=60)
        setup.allocator.alloc(60)
        adder = setup.adder([running(41, 21, rid="a")], new_token_ratio=0.0)
        assert adder.preempt_to_schedule(req(50, 20, priority=20), min_priority_gap=10) == []

    def test_the_gap_must_be_exceeded(self, impl: type[PrefillAdder]) -> None:
        setup = Setup(impl, pool=60)
        setup.allocator.alloc(60)
        adder = setup.adder([running(41, 21, rid="a")], new_token_ratio=0.0)
        assert adder.preempt_to_schedule(req(5, 2, priority=10), min_priority_gap=10) == []
        assert adder.preempt_to_schedule(req(5, 2, priority=11), min_priority_gap=10) != []
