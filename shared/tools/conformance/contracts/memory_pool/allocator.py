"""Clauses of TokenToKVPoolAllocator: allocating slots."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.interfaces import TokenToKVPoolAllocator
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, page_sizes, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device

PAGE_SIZES = page_sizes(1, 4, 16)


def allocator_of(impl: Any, num_pages: int, page_size: int) -> TokenToKVPoolAllocator:
    allocator: TokenToKVPoolAllocator = impl.TokenToKVPoolAllocator(
        num_pages * page_size, page_size, check_device()
    )
    return allocator


def slots(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=check_device())


def expect_slots(what: str, given: Any, num_tokens: int) -> list[int]:
    """Check that `given` is an int64 tensor of `num_tokens` distinct slots."""
    expect_true(f"{what} gives a tensor", isinstance(given, torch.Tensor), given)
    form = (tuple(given.shape), given.dtype)
    expect_equal(f"{what}, form", form, ((num_tokens,), torch.int64))
    ids: list[int] = given.tolist()
    expect_equal(f"{what}, distinct slots", len(set(ids)), num_tokens)
    return ids


def expect_page_order(what: str, sequence: list[int], page_size: int, start: int = 0) -> None:
    """Check that consecutive positions of a page have consecutive slots; sequence[i] is the slot of position
    start + i."""
    for i, slot in enumerate(sequence):
        expect_equal(
            f"{what}, position {start + i}'s place in its page", slot % page_size, (start + i) % page_size
        )
        if i > 0 and (start + i) % page_size != 0:
            expect_equal(f"{what}, position {start + i}'s slot", slot, sequence[i - 1] + 1)


@contract(
    "A size that is no positive multiple of page_size is a ValueError.",
    table(
        "size page_size",
        ("nothing", 0, 1),
        ("negative", -4, 4),
        ("half a page over", 6, 4),
        ("half a page", 2, 4),
        ("pages of nothing", 4, 0),
    ),
)
def bad_sizes(impl: Any, case: Case) -> None:
    if case.page_size < 1 or case.size < 1 or case.size % case.page_size:
        expect_raises(
            f"size {case.size}, page_size {case.page_size}",
            ValueError,
            impl.TokenToKVPoolAllocator,
            case.size,
            case.page_size,
            check_device(),
        )


@contract(
    "alloc returns the slots page_size .. size + page_size - 1, each once, never the dummy page.", PAGE_SIZES
)
def every_slot_once(impl: Any, case: Case) -> None:
    page_size = case.page_size
    allocator = allocator_of(impl, 8, page_size)
    form = (allocator.size, allocator.page_size, torch.device(allocator.device).type)
    expect_equal("size, page_size, device", form, (8 * page_size, page_size, check_device().type))
    expect_equal("available_size()", allocator.available_size(), 8 * page_size)
    where = (allocator.alloc(0).device.type, allocator.free_slots().device.type)
    expect_equal("the device of slots", where, (allocator.slot_device.type,) * 2)
    taken: list[int] = []
    for i in range(4):
        ids = expect_slots(f"alloc number {i}", allocator.alloc(2 * page_size), 2 * page_size)
        expect_page_order(f"alloc number {i}", ids, page_size)
        taken += ids
    expect_equal("available_size() at the end", allocator.available_size(), 0)
    expect_equal("all slots", sorted(taken), list(range(page_size, 9 * page_size)))


@contract("alloc returns None, without allocating any, if fewer slots are free.", PAGE_SIZES)
def alloc_short(impl: Any, case: Case) -> None:
    page_size = case.page_size
    allocator = allocator_of(impl, 3, page_size)
    expect_equal("alloc of 4 pages of 3", allocator.alloc(4 * page_size), None)
    expect_equal("available_size() afterwards", allocator.available_size(), 3 * page_size)
    expect_slots("alloc of all", allocator.alloc(3 * page_size), 3 * page_size)
    expect_equal("alloc of a page when all are out", allocator.alloc(page_size), None)
    expect_slots("alloc(0) when all are out", allocator.alloc(0), 0)


@contract("alloc takes whole pages: anything else is an AssertionError.", EXAMPLE)
def alloc_whole_pages(impl: Any, case: Case) -> None:
    expect_raises("alloc(6), page_size 4", AssertionError, allocator_of(impl, 4, 4).alloc, 6)


@contract("alloc_extend fills the last page from the last slot on, then takes new pages.", EXAMPLE)
def extend_fills_the_last_page(impl: Any, case: Case) -> None:
    """page_size 4, 6 tokens of which the last sits in slot 21; to 15 tokens: 2 slots of its page, 2 pages."""
    allocator = allocator_of(impl, 16, 4)
    allocator.alloc(64)
    allocator.free(slots(9 * 4, 3 * 4))
    grown = expect_slots("alloc_extend", allocator.alloc_extend([6], [15], [21]), 9)
    expect_equal("the rest of the page", grown[:2], [22, 23])
    expect_equal("the new pages", {grown[2] // 4, grown[6] // 4}, {9, 3})
    expect_page_order("the request", grown, 4, start=6)
    expect_equal("available_size()", allocator.available_size(), 0)
    expect_equal("alloc when all are out", allocator.alloc(4), None)


@contract(
    "alloc_extend takes ceil(seq / page) - ceil(prefix / page) pages, at every page boundary.",
    tuple(
        case
        for p in (1, 4, 16)
        for case in grid(
            "page {page_size}, {prefix_len} tokens and {grow_by} more",
            page_size=p,
            prefix_len=sorted({0, p - 1, p, p + 1}),
            grow_by=(0, 1, 3, 16, 17, 40),
        )
    ),
)
def extend_at_page_borders(impl: Any, case: Case) -> None:
    page_size, prefix_len, seq_len = case.page_size, case.prefix_len, case.prefix_len + case.grow_by
    allocator = allocator_of(impl, 64, page_size)
    request = expect_slots("the prefix", allocator.alloc_extend([0], [prefix_len], [-1]), prefix_len)
    before = allocator.available_size()
    last_loc = request[-1] if request else -1
    request += expect_slots(
        "the extension", allocator.alloc_extend([prefix_len], [seq_len], [last_loc]), case.grow_by
    )
    expect_equal("distinct slots of the request", len(set(request)), seq_len)
    expect_page_order("the request", request, page_size)
    num_new_pages = -(-seq_len // page_size) - -(-prefix_len // page_size)
    expect_equal("slots taken", before - allocator.available_size(), num_new_pages * page_size)


@contract("The slots of several requests are concatenated in order.", EXAMPLE)
def extend_several(impl: Any, case: Case) -> None:
    allocator = allocator_of(impl, 16, 4)
    first, second = allocator.alloc(4).tolist(), allocator.alloc(4).tolist()
    grown = expect_slots(
        "alloc_extend", allocator.alloc_extend([2, 0, 4], [3, 5, 9], [first[1], -1, second[3]]), 11
    )
    expect_equal("the first request's slot", grown[0], first[2])
    expect_page_order("the second request", grown[1:6], 4)
    expect_page_order("the third request", second + grown[6:], 4)
    owned = {*first, *second, *grown}
    expect_equal("distinct slots", len(owned), len(first) + len(second) + len(grown) - 1)  # first[2] again


@contract("If one request does not fit, alloc_extend allocates nothing, although others would fit.", EXAMPLE)
def extend_short(impl: Any, case: Case) -> None:
    allocator = allocator_of(impl, 3, 4)
    expect_equal("alloc_extend of 4 pages of 3", allocator.alloc_extend([0, 0], [8, 8], [-1, -1]), None)
    expect_equal("available_size() afterwards", allocator.available_size(), 12)
    expect_slots("alloc_extend of all", allocator.alloc_extend([0], [12], [-1]), 12)


@contract("A last slot that cannot hold the last token is an AssertionError.", EXAMPLE)
def extend_checks_the_last_slot(impl: Any, case: Case) -> None:
    allocator = allocator_of(impl, 8, 4)
    allocator.alloc(32)
    expect_raises("token 5 in slot 20", AssertionError, allocator.alloc_extend, [6], [7], [20])


@contract("alloc_decode gives each request one slot, also at page boundaries.", PAGE_SIZES)
def decode_one_slot_each(impl: Any, case: Case) -> None:
    page_size = case.page_size
    allocator = allocator_of(impl, 64, page_size)
    lens = [1, page_size, 2 * page_size + 1]
    flat = expect_slots("the prompts", allocator.alloc_extend([0] * 3, lens, [-1] * 3), sum(lens))
    rows = [flat[: lens[0]], flat[lens[0] : -lens[2]], flat[-lens[2] :]]
    for _ in range(2 * page_size + 1):
        lens = [n + 1 for n in lens]
        new = expect_slots("alloc_decode", allocator.alloc_decode(lens, [row[-1] for row in rows]), 3)
        for row, slot in zip(rows, new):
            row.append(slot)
    for i, row in enumerate(rows):
        expect_page_order(f"request {i}", row, page_size)
    everything = [slot for row in rows for slot in row]
    expect_equal("distinct slots", len(set(everything)), len(everything))
    num_pages = sum(-(-n // page_size) for n in lens)
    expect_equal("available_size()", allocator.available_size(), (64 - num_pages) * page_size)


@contract("If one request does not fit, alloc_decode allocates nothing.", EXAMPLE)
def decode_short(impl: Any, case: Case) -> None:
    allocator = allocator_of(impl, 3, 4)
    flat = allocator.alloc_extend([0, 0], [4, 4], [-1, -1]).tolist()
    expect_equal("alloc_decode", allocator.alloc_decode([5, 5], [flat[3], flat[7]]), None)
    expect_equal("available_size() afterwards", allocator.available_size(), 4)
