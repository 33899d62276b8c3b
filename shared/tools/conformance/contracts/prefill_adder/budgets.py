"""Clauses of the prefill adder: its budgets."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.interfaces import AddReqResult, PrefillAdder, PrefillBudget, RadixKey
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.types import Req, SamplingParams


class Setup:
    """Pools, a radix tree, and a prefill adder."""

    def __init__(self, impl: type[PrefillAdder], pool: int = 1024, page_size: int = 1) -> None:
        self.impl = impl
        self.page_size = page_size
        pools = registry.load("memory_pool", "reference")
        self.allocator = pools.TokenToKVPoolAllocator(pool, page_size, "cpu")
        rows = pools.ReqToTokenPool(8, 256, "cpu")
        self.tree = registry.load("radix_cache", "reference")(page_size, self.allocator, rows)

    def adder(self, running: list[Req] | None = None, **budget: Any) -> PrefillAdder:
        values: dict[str, Any] = {
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


def req(num_prompt: int, max_new: int = 10, num_output: int = 0, rid: str = "r", **fields: Any) -> Req:
    params = SamplingParams(max_new_tokens=max_new)
    return Req(rid, list(range(1, num_prompt + 1)), params, 0, output_ids=[7] * num_output, **fields)


def running(max_new: int = 10, num_output: int = 1, **fields: Any) -> Req:
    made = req(5, max_new, num_output, **fields)
    made.kv_committed_len = made.kv_allocated_len = 5 + num_output - 1
    return made


@contract(
    "Running requests reserve their possible output, clipped and scaled; mixed tokens and drafts count.",
    EXAMPLE,
)
def initial_budgets(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=10_000)
    adder = setup.adder(
        [running(101, 1), running(100_000, 1)],
        max_prefill_tokens=500,
        chunked_prefill_size=64,
        num_mixed_decode_tokens=2,
        num_reserved_tokens=300,
    )
    expect_equal("rem_total_tokens", adder.rem_total_tokens, 10_000 - 2 - 300 - 50 - 2048)
    expect_equal("rem_input_tokens", adder.rem_input_tokens, 498)
    expect_equal("rem_chunk_tokens", adder.rem_chunk_tokens, 62)
    setup.cache(list(range(1, 41)))
    expect_equal(
        "rem_total_tokens, 40 of them evictable", adder.rem_total_tokens, 10_000 - 2 - 300 - 50 - 2048
    )
    setup.tree.inc_lock_ref(setup.tree.match_prefix(RadixKey(list(range(1, 41)))).last_node)
    expect_equal("rem_total_tokens, 40 of them locked", adder.rem_total_tokens, 9_960 - 2 - 300 - 50 - 2048)


@contract("A prompt that fits is added whole, and reduces all three budgets.", EXAMPLE)
def added_whole(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    adder = setup.adder(chunked_prefill_size=100)
    added = req(20, 30)
    expect_equal("add_one_req", adder.add_one_req(added), AddReqResult.CONTINUE)
    expect_equal("can_run_list", adder.can_run_list, [added])
    expect_equal("fill_ids", added.fill_ids, added.origin_input_ids)
    expect_equal(
        "extend_input_len, new_chunked_req",
        (added.extend_input_len, adder.new_chunked_req),
        (20, None),
    )
    expect_equal("rem_total_tokens", adder.rem_total_tokens, 1024 - 20 - 30)
    expect_equal(
        "rem_input_tokens, rem_chunk_tokens",
        (adder.rem_input_tokens, adder.rem_chunk_tokens),
        (9980, 80),
    )


@contract("A cached prefix is locked and does not reduce the budgets.", EXAMPLE)
def a_cached_prefix_is_locked_and_not_paid_for(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    setup.cache(list(range(1, 16)))
    adder = setup.adder()
    added = req(20, 30)
    adder.add_one_req(added)
    expect_equal(
        "prefix, protected, extension",
        (len(added.prefix_indices), added.cache_protected_len, added.extend_input_len),
        (15, 15, 5),
    )
    expect_equal("protected_size()", setup.tree.protected_size(), 15)
    expect_equal("rem_total_tokens", adder.rem_total_tokens, 1024 - 15 - 5 - 30)


@contract("The match ends before the first prompt log-probability.", EXAMPLE)
def prefix_is_capped_where_prompt_logprobs_begin(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    setup.cache(list(range(1, 21)))
    params = SamplingParams(return_logprob=True, logprob_start_len=8)
    added = Req("r", list(range(1, 21)), params, 0)
    setup.adder().add_one_req(added)
    expect_equal("len(prefix_indices)", len(added.prefix_indices), 7)


@contract("Extensions reduce the budgets by whole pages.", EXAMPLE)
def pages_are_charged_whole(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, page_size=16)
    adder = setup.adder(chunked_prefill_size=64)
    adder.add_one_req(req(17, 3))
    expect_equal("rem_total_tokens", adder.rem_total_tokens, 1024 - 32 - 3)
    expect_equal("rem_chunk_tokens", adder.rem_chunk_tokens, 32)


@contract("extension + output >= rem_total is NO_TOKEN; one token less fits.", EXAMPLE)
def no_room_for_the_output_is_no_token(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=100)
    for max_new, expected in ((76, AddReqResult.NO_TOKEN), (75, AddReqResult.CONTINUE)):
        adder = setup.adder([running(9, 1)])  # reserves 4
        waiting = req(20, max_new)
        expect_equal("add_one_req", adder.add_one_req(waiting), expected)
        expect_equal("bool(can_run_list)", bool(adder.can_run_list), (expected is AddReqResult.CONTINUE))


@contract(
    "rem_total is checked again after the prefix is locked; a request that is not added is unlocked.", EXAMPLE
)
def locking_the_prefix_counts(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=60)
    setup.cache(list(range(1, 41)))
    adder = setup.adder([running(2, 1)])
    waiting = req(45, 20)
    expect_equal("add_one_req", adder.add_one_req(waiting), AddReqResult.NO_TOKEN)
    expect_equal("protected_size()", setup.tree.protected_size(), 0)
    expect_equal("last_node", waiting.last_node, None)
    expect_equal("can_run_list", adder.can_run_list, [])


@contract("A request alone needs room for its own tokens only.", EXAMPLE)
def a_lone_request_needs_only_its_own_tokens(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=32)
    expect_equal("add_one_req", setup.adder().add_one_req(req(32, 1)), AddReqResult.CONTINUE)
    expect_equal(
        "add_one_req",
        setup.adder([running(2, 1)]).add_one_req(req(32, 1)),
        AddReqResult.NO_TOKEN,
    )


@contract("The first request may exceed the input budget, the next may not.", EXAMPLE)
def input_budget(impl: type[PrefillAdder], case: Case) -> None:
    adder = Setup(impl).adder(max_prefill_tokens=50)
    expect_equal("add_one_req", adder.add_one_req(req(80, rid="a")), AddReqResult.CONTINUE)
    expect_equal("add_one_req", adder.add_one_req(req(5, rid="b")), AddReqResult.OTHER)
    adder = Setup(impl).adder(max_prefill_tokens=50)
    expect_equal("add_one_req", adder.add_one_req(req(30, rid="a")), AddReqResult.CONTINUE)
    expect_equal("add_one_req", adder.add_one_req(req(19, rid="b")), AddReqResult.CONTINUE)
    expect_equal("add_one_req", adder.add_one_req(req(1, rid="c")), AddReqResult.OTHER)


@contract(
    "A long prompt is cut to whole pages and reserves no output; then the chunk budget is used up.",
    table(
        "page_size chunk first",
        (1, 7, 7),
        (4, 7, 4),
        (4, 8, 8),
        (16, 31, 16),
        name="{chunk} of page {page_size}",
    ),
)
def a_long_prompt_is_cut_to_whole_pages(impl: type[PrefillAdder], case: Case) -> None:
    page_size, chunk, first = case.page_size, case.chunk, case.first
    setup = Setup(impl, page_size=page_size)
    adder = setup.adder(chunked_prefill_size=chunk)
    waiting = req(100, 30)
    expect_equal("add_one_req", adder.add_one_req(waiting), AddReqResult.CONTINUE)
    expect_equal("new_chunked_req", adder.new_chunked_req, waiting)
    expect_equal("fill_ids", waiting.fill_ids, waiting.origin_input_ids[:first])
    expect_equal("rem_total_tokens", adder.rem_total_tokens, 1024 - first)  # a chunk reserves no output
    expect_equal(
        "add_one_req",
        adder.add_one_req(req(page_size + chunk, rid="next")),
        AddReqResult.OTHER,
    )


@contract(
    "A prompt is added whole if its extension in whole pages fits into the chunk budget, else it is cut.",
    table(
        "page_size num_mixed length added",
        (4, 2, 4, 4),
        (4, 2, 5, 4),  # 5 tokens fit into the budget of 6, two pages do not
        (4, 0, 7, 7),
        (16, 1, 16, 16),
        (16, 1, 30, 16),
        name="{length} tokens of page {page_size}, {num_mixed} decode tokens",
    ),
)
def the_chunk_budget_counts_whole_pages(impl: type[PrefillAdder], case: Case) -> None:
    adder = Setup(impl, page_size=case.page_size).adder(
        chunked_prefill_size=2 * case.page_size, num_mixed_decode_tokens=case.num_mixed
    )
    waiting = req(case.length)
    expect_equal("add_one_req", adder.add_one_req(waiting), AddReqResult.CONTINUE)
    expect_equal("extend_input_len", waiting.extend_input_len, case.added)
    is_cut = case.added < case.length
    expect_equal("new_chunked_req", adder.new_chunked_req, waiting if is_cut else None)


def chunked(num_computed: int, num_prompt: int = 100, max_new: int = 30) -> Req:
    made = req(num_prompt, max_new)
    made.prefix_indices = torch.arange(num_computed)
    return made


@contract(
    "A chunked request continues after its prefix, and reserves its output with its last chunk.",
    EXAMPLE,
)
def a_chunked_request_goes_on_and_ends(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    waiting = chunked(90)
    adder = setup.adder(chunked_prefill_size=7)
    expect_equal("add_chunked_req", adder.add_chunked_req(waiting), waiting)
    expect_equal("len(fill_ids)", len(waiting.fill_ids), 97)
    waiting.prefix_indices = torch.arange(97)
    adder = setup.adder(chunked_prefill_size=7)
    expect_equal("add_chunked_req", adder.add_chunked_req(waiting), None)
    expect_equal("len(fill_ids)", len(waiting.fill_ids), 100)
    expect_equal("rem_total_tokens", adder.rem_total_tokens, 1024 - 3 - 30)
    expect_equal("rem_chunk_tokens", adder.rem_chunk_tokens, 4)


@contract(
    "A chunked request without budget waits for the next step: decode tokens may use up the chunk.",
    table("num_mixed", ("whole", 8), ("more", 9)),
)
def a_chunked_request_without_budget_is_parked(impl: type[PrefillAdder], case: Case) -> None:
    adder = Setup(impl).adder(chunked_prefill_size=8, num_mixed_decode_tokens=case.num_mixed)
    waiting = chunked(40)
    expect_equal("add_chunked_req", adder.add_chunked_req(waiting), waiting)
    expect_equal("can_run_list", adder.can_run_list, [])


@contract("A chunk is no larger than the free memory.", EXAMPLE)
def a_chunked_request_takes_no_more_memory_than_there_is(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=64, page_size=4)
    setup.allocator.alloc(56)
    adder = setup.adder(chunked_prefill_size=32)
    waiting = chunked(40)
    expect_equal("add_chunked_req", adder.add_chunked_req(waiting), waiting)
    expect_equal("extend_input_len", waiting.extend_input_len, 8)
    setup.allocator.alloc(8)
    expect_true(
        "add_chunked_req",
        setup.adder(chunked_prefill_size=32).add_chunked_req(chunked(40)) is not None,
    )


@contract(
    "Requests of the lowest priority are preempted first, then the most recently queued, as few as suffice.",
    EXAMPLE,
)
def least_important_and_latest_first_as_few_as_suffice(impl: type[PrefillAdder], case: Case) -> None:
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
    expect_equal("[v.rid for v in chosen]", [v.rid for v in chosen], ["less", "new"])


@contract("The reservations of preempted requests are removed from the budget.", EXAMPLE)
def preempted_reserve_nothing(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=100)
    setup.allocator.alloc(60)
    adder = setup.adder([running(41, 21, rid="a"), running(61, 21, rid="b", priority=20)])
    before = adder.rem_total_tokens
    chosen = adder.preempt_to_schedule(req(5, 2, priority=20), min_priority_gap=10)
    expect_equal("[v.rid for v in chosen]", [v.rid for v in chosen], ["a"])
    expect_equal("rem_total_tokens", adder.rem_total_tokens, before + 10)


@contract("If preemption cannot make enough room, no request is preempted.", EXAMPLE)
def all_or_nothing(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=60)
    setup.allocator.alloc(60)
    adder = setup.adder([running(41, 21, rid="a")], new_token_ratio=0.0)
    expect_equal(
        "preempt_to_schedule",
        adder.preempt_to_schedule(req(50, 20, priority=20), min_priority_gap=10),
        [],
    )


@contract(
    "A preempted request frees the slots that it alone owns: its prefix in the cache may be shared.", EXAMPLE
)
def a_shared_prefix_is_not_freed(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=60)
    setup.cache(list(range(1, 41)))
    prefix = setup.tree.match_prefix(RadixKey(list(range(1, 41))))
    sharers = [running(41, 21, rid=rid, queue_start_time=time) for rid, time in (("old", 1.0), ("new", 2.0))]
    for sharer in sharers:
        setup.allocator.alloc(10)
        setup.tree.inc_lock_ref(prefix.last_node)
        sharer.last_node, sharer.cache_protected_len = prefix.last_node, 40
        sharer.kv_committed_len = sharer.kv_allocated_len = 50
    for needed, expected in ((9, ["new"]), (10, ["new", "old"]), (20, [])):  # and one token of output
        adder = setup.adder(sharers, new_token_ratio=0.0)
        chosen = adder.preempt_to_schedule(req(needed - 1, 1, priority=20), min_priority_gap=10)
        expect_equal(f"preempted for {needed} tokens", [victim.rid for victim in chosen], expected)


@contract("The priority gap must be exceeded, not met.", EXAMPLE)
def the_gap_must_be_exceeded(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl, pool=60)
    setup.allocator.alloc(60)
    adder = setup.adder([running(41, 21, rid="a")], new_token_ratio=0.0)
    expect_equal(
        "preempt_to_schedule",
        adder.preempt_to_schedule(req(5, 2, priority=10), min_priority_gap=10),
        [],
    )
    expect_true(
        "preempt_to_schedule",
        adder.preempt_to_schedule(req(5, 2, priority=11), min_priority_gap=10) != [],
    )
