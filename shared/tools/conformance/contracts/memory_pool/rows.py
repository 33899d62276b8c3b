"""Clauses of ReqToTokenPool: the rows that map positions to slots."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import torch

from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device


def rows_of(impl: Any, size: int = 3, max_len: int = 8) -> ReqToTokenPool:
    pool: ReqToTokenPool = impl.ReqToTokenPool(size, max_len, check_device())
    return pool


def slots(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=check_device())


@contract("alloc returns rows 1..size, each to one owner; req_to_token has row 0 as well.", EXAMPLE)
def rows_are_distinct(impl: Any, case: Case) -> None:
    pool = rows_of(impl, 5, 8)
    table = pool.req_to_token
    expect_equal(
        "req_to_token's form",
        (tuple(table.shape), table.dtype, table.device.type),
        ((6, 8), torch.int32, check_device().type),
    )
    expect_equal("size, max_len", (pool.size, pool.max_len), (5, 8))
    expect_equal("available_size()", pool.available_size(), 5)
    expect_equal("all rows", sorted(pool.alloc(2) + pool.alloc(3)), [1, 2, 3, 4, 5])
    expect_equal("available_size() when all are out", pool.available_size(), 0)


@contract("alloc returns None, without allocating any, if fewer rows are free.", EXAMPLE)
def rows_short(impl: Any, case: Case) -> None:
    pool = rows_of(impl)
    expect_equal("alloc(4) of 3", pool.alloc(4), None)
    expect_equal("available_size() afterwards", pool.available_size(), 3)
    expect_equal("alloc(0)", pool.alloc(0), [])
    expect_equal("the number of rows alloc(3) gives", len(pool.alloc(3)), 3)
    expect_equal("alloc(1) of none", pool.alloc(1), None)


def _random_calls(seed: int) -> Case:
    rng = random.Random(seed)
    calls = tuple(rng.choice([rng.randint(1, 3), -rng.randint(0, 5)]) for _ in range(30))
    return Case(f"random calls {seed}", size=rng.choice([1, 3, 7]), calls=calls)


@contract(
    "Rows are allocated first in, first out.",
    (Case("two in turn", size=3, calls=(3, -1, -1, 0, 1, 2)), *(_random_calls(seed) for seed in range(8))),
)
def rows_first_in_first_out(impl: Any, case: Case) -> None:
    """`calls`: n > 0 allocates n rows, n <= 0 frees the (-n)th of those in use (modulo their number)."""
    pool = rows_of(impl, case.size)
    fresh, returned = set(range(1, case.size + 1)), deque[int]()  # the order of fresh rows is not specified
    used: list[int] = []
    for i, n in enumerate(case.calls):
        if n > 0:
            rows = pool.alloc(n)
            if n > len(fresh) + len(returned):
                expect_equal(f"call {i}: alloc({n})", rows, None)
            else:
                num_fresh = min(n, len(fresh))
                expect_true(f"call {i}: rows never used come first", fresh >= set(rows[:num_fresh]), rows)
                fresh -= set(rows[:num_fresh])
                again = [returned.popleft() for _ in range(n - num_fresh)]
                expect_equal(f"call {i}: rows used again", rows[num_fresh:], again)
                used += rows
        elif used:
            returned.append(used.pop(-n % len(used)))
            pool.free([returned[-1]])
        expect_equal(f"call {i}: available_size()", pool.available_size(), case.size - len(used))


@contract(
    "Freeing a row that is not allocated, or row 0, is an AssertionError.",
    table("row", ("the dummy", 0), ("a free one", 2), ("beyond the last", 7)),
)
def rows_not_handed_out(impl: Any, case: Case) -> None:
    pool = rows_of(impl)
    (taken,) = pool.alloc(1)
    if taken == case.row:
        pool.free([taken])
    num_free = pool.available_size()
    expect_raises(f"free([{case.row}])", AssertionError, pool.free, [case.row])
    expect_equal("available_size()", pool.available_size(), num_free)


@contract("A row freed twice is an AssertionError.", EXAMPLE)
def rows_freed_twice(impl: Any, case: Case) -> None:
    pool = rows_of(impl)
    rows = pool.alloc(2)
    pool.free(rows)
    expect_raises("free() of a free row", AssertionError, pool.free, rows[:1])
    (row,) = pool.alloc(1)
    expect_raises("free() of a row twice in one call", AssertionError, pool.free, [row, row])


@contract(
    "write changes the given positions of its row and nothing else; read returns them in int64.", EXAMPLE
)
def rows_written_and_read(impl: Any, case: Case) -> None:
    pool = rows_of(impl, 3, 6)
    a, b, _ = pool.alloc(3)
    pool.write(a, 0, slots(10, 11, 12, 13, 14, 15))
    pool.write(b, 0, slots(20, 21, 22, 23, 24, 25))
    pool.write(a, 2, slots(77, 78))
    pool.write(a, 6, slots())
    pool.write(b, 5, slots(26).to(torch.int32))
    expect_equal("one row", pool.read(a, 0, 6), slots(10, 11, 77, 78, 14, 15))
    expect_equal("part of the other", pool.read(b, 1, 4), slots(21, 22, 23))
    expect_equal("its last position", pool.read(b, 5, 6), slots(26))
    expect_equal("an empty range", pool.read(a, 3, 3), slots())
    expect_equal("req_to_token itself", pool.req_to_token[a].tolist(), [10, 11, 77, 78, 14, 15])
    expect_equal("row 0", pool.req_to_token[0].tolist(), [0] * 6)


@contract("write_ragged is write for many rows; read_each reads one position of each row.", EXAMPLE)
def rows_written_at_once(impl: Any, case: Case) -> None:
    pool = rows_of(impl, 3, 6)
    a, b, c = pool.alloc(3)
    pool.write(a, 0, slots(10, 11, 12, 13, 14, 15))
    pool.write(b, 0, slots(20, 21, 22, 23, 24, 25))
    pool.write_ragged([c, a, b], [0, 2, 6], [3, 2, 0], slots(30, 31, 32, 77, 78))
    pool.write_ragged([], [], [], slots())
    expect_equal("a new row", pool.read(c, 0, 3), slots(30, 31, 32))
    expect_equal("in the middle of a row", pool.read(a, 0, 6).tolist(), [10, 11, 77, 78, 14, 15])
    expect_equal("nothing for a full row", pool.read(b, 0, 6).tolist(), [20, 21, 22, 23, 24, 25])
    pool.write_ragged([b, a], [5, 0], [1, 1], slots(88, 99).to(torch.int32))
    expect_equal("one position each", pool.read_each([a, b, c, b], [0, 5, 2, 0]), [99, 88, 32, 20])
    expect_equal("no position", pool.read_each([], []), [])
    expect_equal("req_to_token itself", pool.req_to_token[a].tolist(), [99, 11, 77, 78, 14, 15])
    expect_equal("row 0", pool.req_to_token[0].tolist(), [0] * 6)


@contract("read returns a copy.", EXAMPLE)
def rows_read_a_copy(impl: Any, case: Case) -> None:
    pool = rows_of(impl)
    (row,) = pool.alloc(1)
    pool.write(row, 0, slots(5, 6))
    before = pool.read(row, 0, 2)
    before.fill_(99)
    expect_equal("the row after its copy was changed", pool.read(row, 0, 2), slots(5, 6))
    before = pool.read(row, 0, 2)
    pool.write(row, 0, slots(7, 8))
    expect_equal("the copy after the row was changed", before, slots(5, 6))


@contract("clear frees all rows.", EXAMPLE)
def rows_cleared(impl: Any, case: Case) -> None:
    pool = rows_of(impl)
    pool.alloc(2)
    pool.clear()
    expect_equal("available_size()", pool.available_size(), 3)
    expect_equal("all rows", sorted(pool.alloc(3)), [1, 2, 3])
