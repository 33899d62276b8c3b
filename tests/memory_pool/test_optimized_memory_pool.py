"""The optimized pools: call for call the reference's slots, and what goes to a device when there is one."""

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
from diptych.shared.tools.conformance.contracts.memory_pool.rows import (
    rows_written_and_read,
    rows_written_at_once,
)
from diptych.shared.tools.conformance.oracles.schedules import random_schedule, run_schedule


class Both:
    """Both allocators through the same calls, each of which must give the same slots, in the same order."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        size = num_pages * page_size
        self.allocators: list[Any] = [
            pool.TokenToKVPoolAllocator(size, page_size, "cpu") for pool in (memory_pool, reference)
        ]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            results = [_outcome(getattr(allocator, name), args) for allocator in self.allocators]
            assert results[0] == results[1], (name, args)
            return results[0]

        return call


def _outcome(call: Any, args: Any) -> Any:
    try:
        result = call(*args)
    except AssertionError:
        return "refused"
    return (result.tolist(), result.dtype) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(6))
def test_any_calls_give_the_references_slots(page_size: int, seed: int) -> None:
    """Wrong calls among them: what is refused changes nothing."""
    rng = random.Random(seed)
    both = Both(rng.choice([5, 30]), page_size)
    owned: list[list[int]] = []
    for _ in range(300):
        kind = rng.choice(["extend", "extend", "decode", "decode", "alloc", "free", "free", "wrong"])
        if kind == "extend":
            old = [owned.pop(rng.randrange(len(owned))) if owned and rng.random() < 0.5 else [] for _ in "ab"]
            lens = [len(slots) for slots in old]
            new = [n + rng.randint(0, 2 * page_size) for n in lens]
            given = both.alloc_extend(lens, new, [slots[-1] if slots else -1 for slots in old])
            grown = given[0] if given is not None else []
            num_first = new[0] - lens[0]
            more = [grown[:num_first], grown[num_first:]]
            owned += [slots + extra for slots, extra in zip(old, more) if slots or extra]
        elif kind == "decode":
            given = both.alloc_decode([len(slots) + 1 for slots in owned], [slots[-1] for slots in owned])
            for slots, slot in zip(owned, given[0] if given is not None else []):
                slots.append(slot)
        elif kind == "alloc":
            given = both.alloc(rng.randint(0, 3) * page_size)
            owned += [given[0]] if given and given[0] else []
        elif kind == "free" and owned:
            slots = owned.pop(rng.randrange(len(owned)))
            both.free(torch.tensor(rng.choice([slots, slots[::-1], rng.sample(slots, len(slots))])))
        elif kind == "wrong":
            both.free(torch.tensor(rng.choices(range(-3, 40 * page_size), k=rng.randint(1, 2))))
            owned = _still_owned(both, owned, page_size)
        assert both.available_size() % page_size == 0
        both.free_slots()


def _still_owned(both: Both, owned: list[list[int]], page_size: int) -> list[list[int]]:
    """A wrong call may have hit what is owned: who lost a page is forgotten, the rest of it freed."""
    used = set(both.allocators[1]._used_pages)
    kept = []
    for slots in owned:
        pages = {slot // page_size for slot in slots}
        if pages <= used:
            kept.append(slots)
        elif pages & used:
            both.free(torch.tensor([page * page_size for page in sorted(pages & used)]))
    return kept


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
    "seed", [*range(2000, 2012), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2012, 2030))]
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
