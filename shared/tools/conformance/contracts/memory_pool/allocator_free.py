"""Clauses of TokenToKVPoolAllocator: freeing slots."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises
from diptych.shared.tools.conformance.contracts.memory_pool.allocator import PAGE_SIZES, allocator_of, slots


@contract(
    "free frees every page that has a slot of its argument, once; an empty tensor is allowed.", PAGE_SIZES
)
def free_whole_pages(impl: Any, case: Case) -> None:
    page_size = case.page_size
    allocator = allocator_of(impl, 4, page_size)
    taken = allocator.alloc(4 * page_size)
    allocator.free(taken[page_size - 1 : page_size])
    expect_equal("after one slot of a page", allocator.available_size(), page_size)
    allocator.free(taken[page_size : 3 * page_size].flip(0))
    expect_equal("after all slots of two pages", allocator.available_size(), 3 * page_size)
    allocator.free(taken[:0])
    expect_equal("after no slot", allocator.available_size(), 3 * page_size)
    again = allocator.alloc(3 * page_size)
    expect_equal("slots allocated again", sorted(again.tolist()), sorted(taken[: 3 * page_size].tolist()))
    first, second = again[0], again[page_size]
    allocator.free(torch.stack([first, second, first + page_size - 1]))
    expect_equal("after two pages, one of them named twice", allocator.available_size(), 2 * page_size)
    expect_equal("how many are free", len(allocator.free_slots()), 2 * page_size)


@contract(
    "Freeing a page twice is an AssertionError.",
    grid(
        "page {page_size}{same_slot}",
        page_size=(1, 4, 16),
        same_slot=("", ", the same slot"),
    ),
)
def freed_twice(impl: Any, case: Case) -> None:
    page_size = case.page_size
    allocator = allocator_of(impl, 4, page_size)
    taken = allocator.alloc(2 * page_size)
    allocator.free(taken[:1])
    again = taken[:1] if case.same_slot else taken[page_size - 1 : page_size]
    expect_raises("free() of a page that is free", AssertionError, allocator.free, again)


@contract("Freeing slots that are not allocated, such as the dummy page, is an AssertionError.", EXAMPLE)
def free_what_is_not_out(impl: Any, case: Case) -> None:
    allocator = allocator_of(impl, 4, 4)
    for slot in (0, 3, 4):
        expect_raises(f"free() of slot {slot}", AssertionError, allocator.free, slots(slot))
    expect_equal("available_size()", allocator.available_size(), 16)


@contract("free_slots lists all free slots, sorted.", PAGE_SIZES)
def free_slots_are_sorted(impl: Any, case: Case) -> None:
    page_size = case.page_size
    allocator = allocator_of(impl, 4, page_size)
    taken = allocator.alloc(4 * page_size)
    expect_equal("when all are out", allocator.free_slots(), slots())
    free = sorted([*taken[3 * page_size :].tolist(), *taken[:page_size].tolist()])
    allocator.free(taken[3 * page_size :])
    allocator.free(taken[:page_size])
    expect_equal("when two pages came back", allocator.free_slots(), slots(*free))
    expect_equal("available_size()", allocator.available_size(), 2 * page_size)


@contract("clear frees all slots.", PAGE_SIZES)
def clear_frees_all(impl: Any, case: Case) -> None:
    page_size = case.page_size
    allocator = allocator_of(impl, 4, page_size)
    taken = allocator.alloc(3 * page_size)
    allocator.free(taken[:page_size])
    allocator.clear()
    expect_equal("available_size()", allocator.available_size(), 4 * page_size)
    expect_equal("free_slots()", allocator.free_slots(), slots(*range(page_size, 5 * page_size)))
    again = allocator.alloc(4 * page_size)
    expect_equal("slots allocated", sorted(again.tolist()), list(range(page_size, 5 * page_size)))
