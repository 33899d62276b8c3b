"""TokenToKVPoolAllocator: every clause of its contract, for several page sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import registry

IMPLS = ["reference"]
PAGE_SIZES = [1, 4, 16]


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


def make_allocator(impl: str, size: int, page_size: int) -> Any:
    return registry.load("memory_pool", impl).TokenToKVPoolAllocator(size, page_size, "cpu")


def slots(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def assert_in_page_order(sequence: list[int], page_size: int) -> None:
    """`sequence[p]` is position p's slot: whole pages in order, a page's slots consecutive."""
    for position, slot in enumerate(sequence):
        assert slot % page_size == position % page_size
        if position % page_size != 0:
            assert slot == sequence[position - 1] + 1


@pytest.mark.parametrize(("size", "page_size"), [(0, 1), (-4, 4), (6, 4), (2, 4), (4, 0)])
def test_size_must_be_a_positive_multiple_of_page_size(impl: str, size: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"{size}.*{page_size}"):
        make_allocator(impl, size, page_size)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_slot_but_the_dummy_page_is_handed_out_once(impl: str, page_size: int) -> None:
    allocator = make_allocator(impl, 8 * page_size, page_size)
    assert allocator.available_size() == 8 * page_size
    taken = [allocator.alloc(2 * page_size) for _ in range(4)]
    assert allocator.available_size() == 0
    assert sorted(torch.cat(taken).tolist()) == list(range(page_size, 9 * page_size))
    assert all(t.dtype == torch.int64 for t in taken)
    for t in taken:
        assert_in_page_order(t.tolist(), page_size)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_alloc_takes_nothing_when_short(impl: str, page_size: int) -> None:
    allocator = make_allocator(impl, 3 * page_size, page_size)
    assert allocator.alloc(4 * page_size) is None
    assert allocator.available_size() == 3 * page_size
    assert len(allocator.alloc(3 * page_size)) == 3 * page_size
    assert allocator.alloc(page_size) is None


def test_alloc_of_nothing_is_empty_even_when_full(impl: str) -> None:
    allocator = make_allocator(impl, 4, 4)
    allocator.alloc(4)
    empty = allocator.alloc(0)
    assert empty.shape == (0,)
    assert empty.dtype == torch.int64


def test_alloc_wants_whole_pages(impl: str) -> None:
    with pytest.raises(AssertionError):
        make_allocator(impl, 16, 4).alloc(6)


def test_extend_fills_the_last_page_then_takes_new_ones(impl: str) -> None:
    """page_size 4, 6 tokens of which the last sits in slot 21; to 15 tokens: 2 slots of its page, 2 pages."""
    allocator = make_allocator(impl, 64, 4)
    allocator.alloc(64)
    allocator.free(slots(9 * 4, 3 * 4))
    grown = allocator.alloc_extend([6], [15], [21]).tolist()
    assert grown[:2] == [22, 23]
    assert {grown[2] // 4, grown[6] // 4} == {9, 3}
    assert_in_page_order([20, 21, *grown][-11:], 4)  # positions 4..14
    assert allocator.available_size() == 0
    assert allocator.alloc(4) is None


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("prefix", ["none", "page-1", "page", "page+1"])
@pytest.mark.parametrize("grow_by", [0, 1, 3, 16, 17, 40])
def test_extend_at_page_borders(impl: str, page_size: int, prefix: str, grow_by: int) -> None:
    prefix_len = {"none": 0, "page-1": page_size - 1, "page": page_size, "page+1": page_size + 1}[prefix]
    allocator = make_allocator(impl, 64 * page_size, page_size)
    sequence = allocator.alloc_extend([0], [prefix_len], [-1]).tolist()
    before = allocator.available_size()
    last_loc = sequence[-1] if sequence else -1
    sequence += allocator.alloc_extend([prefix_len], [prefix_len + grow_by], [last_loc]).tolist()
    assert len(sequence) == len(set(sequence)) == prefix_len + grow_by
    assert_in_page_order(sequence, page_size)
    num_new_pages = -(-(prefix_len + grow_by) // page_size) - -(-prefix_len // page_size)
    assert before - allocator.available_size() == num_new_pages * page_size


def test_extend_of_several_requests_is_concatenated_in_order(impl: str) -> None:
    allocator = make_allocator(impl, 64, 4)
    first, second = allocator.alloc(4).tolist(), allocator.alloc(4).tolist()
    grown = allocator.alloc_extend([2, 0, 4], [3, 5, 9], [first[1], -1, second[3]]).tolist()
    assert grown[0] == first[2]
    assert_in_page_order(grown[1:6], 4)
    assert_in_page_order(second + grown[6:], 4)
    assert len({*first, *second, *grown}) == len(first) + len(second) + len(grown) - 1  # first[2] again


def test_extend_takes_nothing_when_one_of_the_requests_does_not_fit(impl: str) -> None:
    """The first request alone would fit: it must not keep its pages (a partial batch leaks)."""
    allocator = make_allocator(impl, 12, 4)
    assert allocator.alloc_extend([0, 0], [8, 8], [-1, -1]) is None
    assert allocator.available_size() == 12
    assert len(allocator.alloc_extend([0], [12], [-1])) == 12


def test_extend_rejects_a_last_slot_that_cannot_be_the_last(impl: str) -> None:
    with pytest.raises(AssertionError):
        make_allocator(impl, 16, 4).alloc_extend([6], [7], [20])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode_gives_one_slot_per_request(impl: str, page_size: int) -> None:
    allocator = make_allocator(impl, 64 * page_size, page_size)
    lens = [1, page_size, 2 * page_size + 1]
    flat = allocator.alloc_extend([0] * 3, lens, [-1] * 3).tolist()
    rows = [flat[: lens[0]], flat[lens[0] : -lens[2]], flat[-lens[2] :]]
    for _ in range(2 * page_size + 1):
        lens = [n + 1 for n in lens]
        new = allocator.alloc_decode(lens, [row[-1] for row in rows]).tolist()
        for row, slot in zip(rows, new):
            row.append(slot)
    for row in rows:
        assert_in_page_order(row, page_size)
    everything = [slot for row in rows for slot in row]
    assert len(everything) == len(set(everything))
    num_pages = sum(-(-n // page_size) for n in lens)
    assert allocator.available_size() == (64 - num_pages) * page_size


def test_decode_takes_nothing_when_one_of_the_requests_does_not_fit(impl: str) -> None:
    allocator = make_allocator(impl, 12, 4)
    flat = allocator.alloc_extend([0, 0], [4, 4], [-1, -1]).tolist()
    assert allocator.alloc_decode([5, 5], [flat[3], flat[7]]) is None
    assert allocator.available_size() == 4


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_returns_the_whole_page_of_each_slot(impl: str, page_size: int) -> None:
    allocator = make_allocator(impl, 4 * page_size, page_size)
    taken = allocator.alloc(4 * page_size)
    allocator.free(taken[page_size - 1 : page_size])  # one slot of the first page
    assert allocator.available_size() == page_size
    allocator.free(taken[page_size : 3 * page_size])  # all slots of two pages: each page once
    assert allocator.available_size() == 3 * page_size
    allocator.free(taken[:0])
    assert allocator.available_size() == 3 * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("in_group", [False, True])
def test_a_page_freed_twice_is_an_error(impl: str, page_size: int, in_group: bool) -> None:
    """CASES A3: the extra slot of a finished request must not be freed twice."""
    allocator = make_allocator(impl, 4 * page_size, page_size)
    taken = allocator.alloc(2 * page_size)
    if in_group:
        allocator.free_group_begin()
    allocator.free(taken[:page_size])
    with pytest.raises(AssertionError):
        allocator.free(taken[:1])


def test_slots_never_handed_out_cannot_be_freed(impl: str) -> None:
    allocator = make_allocator(impl, 16, 4)
    for slot in (0, 3, 4):  # the dummy page, and a free one
        with pytest.raises(AssertionError):
            allocator.free(slots(slot))
    assert allocator.available_size() == 16


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_grouped_frees_wait_for_the_end(impl: str, page_size: int) -> None:
    allocator = make_allocator(impl, 2 * page_size, page_size)
    taken = allocator.alloc(2 * page_size)
    allocator.free_group_begin()
    allocator.free(taken[:page_size])
    allocator.free(taken[page_size:])
    assert allocator.available_size() == 0
    assert allocator.alloc(page_size) is None
    allocator.free_group_end()
    assert allocator.available_size() == 2 * page_size
    assert sorted(allocator.alloc(2 * page_size).tolist()) == sorted(taken.tolist())


def test_groups_do_not_nest(impl: str) -> None:
    allocator = make_allocator(impl, 4, 4)
    with pytest.raises(AssertionError):
        allocator.free_group_end()
    allocator.free_group_begin()
    with pytest.raises(AssertionError):
        allocator.free_group_begin()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_restore_undoes_allocations_and_frees(impl: str, page_size: int) -> None:
    allocator = make_allocator(impl, 8 * page_size, page_size)
    kept, dropped = allocator.alloc(2 * page_size), allocator.alloc(page_size)
    state = allocator.backup_state()
    expected = allocator.free_slots().tolist()
    allocator.alloc(3 * page_size)
    allocator.free(dropped)
    allocator.restore_state(state)
    assert allocator.free_slots().tolist() == expected
    allocator.alloc(page_size)
    allocator.restore_state(state)  # a state can be taken back more than once
    assert allocator.free_slots().tolist() == expected
    allocator.free(kept)  # handed out before: still handed out
    allocator.free(dropped)
    assert allocator.available_size() == 8 * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_slots_are_sorted_and_complete(impl: str, page_size: int) -> None:
    allocator = make_allocator(impl, 4 * page_size, page_size)
    taken = allocator.alloc(4 * page_size).tolist()
    assert allocator.free_slots().tolist() == []
    allocator.free(slots(*taken[3 * page_size :]))
    allocator.free(slots(*taken[:page_size]))
    assert allocator.free_slots().tolist() == sorted(taken[3 * page_size :] + taken[:page_size])
    allocator.clear()
    assert allocator.free_slots().tolist() == list(range(page_size, 5 * page_size))


def test_clear_closes_nothing_half_done(impl: str) -> None:
    allocator = make_allocator(impl, 8, 4)
    taken = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(taken[:4])
    allocator.clear()
    assert allocator.available_size() == 8
    allocator.free_group_begin()  # no group is left open


@settings(max_examples=60, deadline=None)
@given(data=st.data(), page_size=st.sampled_from(PAGE_SIZES), impl_name=st.sampled_from(IMPLS))
def test_random_requests_come_and_go(data: st.DataObject, page_size: int, impl_name: str) -> None:
    """CASES A1: after every operation each slot is free or has one owner, and the sizes say so."""
    num_pages = 12
    allocator = make_allocator(impl_name, num_pages * page_size, page_size)
    sequences: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["extend", "extend", "decode", "finish"]))
        if action == "extend":
            old = data.draw(st.sampled_from([None, *range(len(sequences))]))
            sequence = [] if old is None else sequences.pop(old)
            new_len = len(sequence) + data.draw(st.integers(1, 3 * page_size))
            num_needed = -(-new_len // page_size) - -(-len(sequence) // page_size)
            fits = num_needed * page_size <= allocator.available_size()
            grown = allocator.alloc_extend([len(sequence)], [new_len], [sequence[-1] if sequence else -1])
            assert (grown is not None) == fits
            if grown is not None:
                sequence = sequence + grown.tolist()
            if sequence:
                sequences.append(sequence)
        elif action == "decode" and sequences:
            grown = allocator.alloc_decode([len(s) + 1 for s in sequences], [s[-1] for s in sequences])
            if grown is not None:
                sequences = [[*s, slot] for s, slot in zip(sequences, grown.tolist())]
        elif action == "finish" and sequences:
            sequence = sequences.pop(data.draw(st.integers(0, len(sequences) - 1)))
            allocator.free(slots(*sequence))
        pages = [slot // page_size for s in sequences for slot in s[::page_size]]
        assert len(pages) == len(set(pages))
        assert allocator.available_size() == (num_pages - len(pages)) * page_size
        owned = {page * page_size + offset for page in pages for offset in range(page_size)}
        assert owned.isdisjoint(allocator.free_slots().tolist())
        for s in sequences:
            assert_in_page_order(s, page_size)
