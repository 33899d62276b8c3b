"""The optimized adder: call for call what the reference decides, with all that can be seen of both."""

from __future__ import annotations

import random
from typing import Any

import pytest

from diptych.optimized.prefill_adder import PrefillAdder
from diptych.optimized.radix_cache import RadixCache
from diptych.reference.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator
from diptych.reference.prefill_adder import PrefillAdder as ReferenceAdder
from diptych.shared.interfaces import AddReqResult, PrefillBudget, RadixKey
from diptych.shared.registry import load
from diptych.shared.tools.conformance.oracles.schedules import random_schedule, run_schedule
from diptych.shared.types import Req, SamplingParams


def random_req(rng: random.Random, number: int, is_running: bool) -> Req:
    prompt = [rng.choice([1, 2])] * rng.choice([0, 7, 20]) + rng.choices([3, 4], k=rng.randint(1, 30))
    max_new = rng.choice([0, 1, 5, 40, 9000])
    req = Req(
        str(number),
        prompt,
        SamplingParams(
            max_new_tokens=max_new, return_logprob=True, logprob_start_len=rng.choice([-1, -1, 2])
        ),
        seed=0,
        priority=rng.randrange(0, 40, 10),
        queue_start_time=float(rng.randrange(3)),
        output_ids=[5] * rng.randint(0, 12),
    )
    if is_running:
        req.kv_committed_len = req.kv_allocated_len = req.num_tokens - 1
    return req


class World:
    """Everything follows from the seed: two worlds of one seed are equal."""

    def __init__(self, impl: type[Any], seed: int) -> None:
        rng = self.rng = random.Random(seed)
        page_size = rng.choice([1, 1, 4, 16])
        self.allocator = TokenToKVPoolAllocator(rng.choice([8, 24, 64]) * 16, page_size, "cpu")
        self.tree = RadixCache(page_size, self.allocator, ReqToTokenPool(8, 256, "cpu"))
        for i in range(rng.randrange(6)):
            key = RadixKey(random_req(rng, i, False).all_ids)
            value = self.allocator.alloc(len(key) // page_size * page_size)
            if value is not None:
                self.allocator.free(value[: self.tree.insert(key, value).prefix_len])
        running = [random_req(rng, 100 + i, True) for i in range(rng.choice([0, 0, 1, 5]))]
        num_mixed = rng.choice([0, len(running)])
        chunk = rng.choice([None, None, 16, 32, 50])
        self.adder = impl(
            PrefillBudget(
                page_size,
                rng.choice([16, 60, 1000]),
                chunk,
                rng.choice([0.0, 0.13, 0.7, 1.0]),
                num_mixed,
                rng.choice([0, 9]),
                rng.choice([None, 0, 3, 20]),
            ),
            self.tree,
            self.allocator,
            running,
        )

    def play(self) -> list[Any]:
        trace: list[Any] = [self.budgets()]
        chunked = None
        for i in range(8):
            req = random_req(self.rng, i, False)
            if i == 0 and self.rng.random() < 0.3:
                cut = self.rng.randrange(0, req.num_tokens) // self.tree.page_size * self.tree.page_size
                slots = self.allocator.alloc(cut)
                if slots is not None:
                    req.prefix_indices, chunked = slots, req
                    trace.append(self.adder.add_chunked_req(req) is req)
            elif self.rng.random() < 0.2:
                victims = self.adder.preempt_to_schedule(req, self.rng.choice([0, 10]))
                trace.append([victim.rid for victim in victims])
            else:
                trace.append(self.adder.add_one_req(req))
            trace.append((self.seen(req), self.budgets(), self.tree.protected_size(), chunked is None))
        return trace

    def budgets(self) -> Any:
        adder = self.adder
        cut = adder.new_chunked_req
        return (
            [req.rid for req in adder.can_run_list],
            None if cut is None else cut.rid,
            (adder.rem_total_tokens, adder.rem_input_tokens, adder.rem_chunk_tokens),
        )

    def seen(self, req: Req) -> Any:
        node = None if req.last_node is None else self.tree.node_id(req.last_node)
        lens = (req.extend_input_len, req.cache_protected_len)
        return req.fill_ids, req.prefix_indices.tolist(), lens, node


def seeds(first: int, count: int, in_fast_cut: int) -> list[Any]:
    return [pytest.param(first + i, marks=[] if i < in_fast_cut else pytest.mark.full) for i in range(count)]


@pytest.mark.parametrize("seed", seeds(0, 300, in_fast_cut=60))
def test_any_calls_are_decided_as_by_the_reference(seed: int) -> None:
    assert World(PrefillAdder, seed).play() == World(ReferenceAdder, seed).play()


def test_fill_ids_are_the_requests_own() -> None:
    added = 0
    for seed in range(20):
        world = World(PrefillAdder, seed)
        req = random_req(random.Random(seed), 1, False)
        added += world.adder.add_one_req(req) is AddReqResult.CONTINUE
        check_fill_ids(req)
    assert added > 5


def check_fill_ids(req: Req) -> None:
    before = req.all_ids
    req.fill_ids.append(9)
    assert req.all_ids == before


@pytest.mark.parametrize("seed", seeds(1000, 60, in_fast_cut=15))
def test_any_schedule_with_all_optimized_host_parts(seed: int) -> None:
    parts = ("schedule_policy", "prefill_adder", "radix_cache")
    run_schedule(random_schedule(seed), {name: load(name, "optimized") for name in parts})
