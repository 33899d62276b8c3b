"""The optimized pools beyond their contract: the order of slots, and what goes to a device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from diptych.optimized import memory_pool
from diptych.optimized.tiers import host_pool
from diptych.reference import memory_pool as reference
from diptych.shared.registry import load
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import clauses_of
from diptych.shared.tools.conformance.contracts.memory_pool.allocator_sequences import Run, random_calls
from diptych.shared.tools.conformance.contracts.memory_pool.rows import (
    rows_written_and_read,
    rows_written_at_once,
)
from diptych.shared.tools.conformance.oracles.schedules import random_schedule, run_schedule


@pytest.mark.parametrize("seed", range(12))
def test_slots_come_in_the_order_of_the_reference(seed: int) -> None:
    case = random_calls(seed, 200)
    runs = [Run(pools, case) for pools in (memory_pool, reference)]
    assert runs[0].play() == runs[1].play()
    assert runs[0].requests == runs[1].requests


@pytest.mark.parametrize(
    ("prefix_lens", "seq_lens", "last_locs", "message"),
    [
        ([0, 5], [3, 4], [-1, 8], "from 5 to 4 tokens"),
        ([0, -1], [3, 4], [-1, -2], "from -1 to 4 tokens"),
        ([4, 6], [9, 7], [7, 20], "slot 20 cannot hold token 5 with page_size 4"),
    ],
)
def test_what_is_wrong_is_named(
    prefix_lens: list[int], seq_lens: list[int], last_locs: list[int], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        memory_pool.TokenToKVPoolAllocator(32, 4, "cpu").alloc_extend(prefix_lens, seq_lens, last_locs)


def test_pages_that_are_not_out_are_named() -> None:
    allocator = memory_pool.TokenToKVPoolAllocator(32, 4, "cpu")
    taken = allocator.alloc(8)
    with pytest.raises(AssertionError, match=r"pages \[0, 3, 77\] are not"):
        allocator.free(torch.cat([taken, torch.tensor([0, 12, 13, 308])]))
    assert allocator.available_size() == 24


def test_a_row_is_not_written_beyond_its_end() -> None:
    pool = memory_pool.ReqToTokenPool(2, 4, "cpu")
    with pytest.raises(AssertionError, match="up to 5 do not fit a row of 4"):
        pool.write_ragged([1, 2], [0, 3], [1, 2], torch.tensor([1, 5, 6]))
    assert not pool.req_to_token.any()


class ApartFromItsDevice(memory_pool.ReqToTokenPool):
    """As if the CPU were a device of its own: its rows are separate from the CPU's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_on_cpu = False
        self.cpu_copy = self.cpu_copy.copy()


@pytest.mark.parametrize("clause", [rows_written_at_once, rows_written_and_read], ids=lambda c: c.name)
def test_what_is_written_is_sent(clause: Any) -> None:
    class Pools:
        ReqToTokenPool = ApartFromItsDevice

    clause.check(Pools, clause.cases[0])


def test_the_host_and_the_device_hold_the_same() -> None:
    rng = random.Random(0)
    pool = ApartFromItsDevice(6, 40, "cpu")
    for _ in range(60):
        rows = rng.sample(range(1, 7), rng.randint(0, 6))
        starts = [rng.randrange(40) for _ in rows]
        lens = [rng.randint(0, 40 - start) for start in starts]
        slots = torch.randint(1, 1000, (sum(lens),))
        pool.write_ragged(rows, starts, lens, slots)
        for row, start, part in zip(rows, starts, slots.split(lens)):
            assert pool.read(row, start, start + len(part)).equal(part)
        assert pool.req_to_token.numpy().tolist() == pool.cpu_copy.tolist()
    assert not pool.req_to_token[0].any()


def test_slots_stay_on_the_host_wherever_the_model_is() -> None:
    allocator = memory_pool.TokenToKVPoolAllocator(32, 4, "meta")
    assert allocator.device.type == "meta"
    assert allocator.slot_device.type == "cpu"
    for slots in (allocator.alloc(8), allocator.alloc_extend([0], [3], [-1]), allocator.free_slots()):
        assert slots.device.type == "cpu"


@pytest.mark.parametrize(
    "seed", [*range(2000, 2004), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2004, 2030))]
)
def test_any_schedule_on_these_pools(seed: int) -> None:
    parts = ("memory_pool", "schedule_policy", "prefill_adder", "radix_cache")
    run_schedule(random_schedule(seed), {name: load(name, "optimized") for name in parts})


@pytest.mark.parametrize("clause", clauses_of("host_pool"), ids=lambda clause: clause.name)
def test_a_store_that_the_staging_memory_cannot_hold(clause: Clause, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are copied one after the other."""
    monkeypatch.setattr(host_pool, "STAGING_BYTES", 1)
    for case in clause.cases:
        clause.run(host_pool.HostPool, case, None)
