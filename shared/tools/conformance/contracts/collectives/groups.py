"""Clauses of collectives: groups, their log, and how they end."""

from __future__ import annotations

import time
from typing import Any

import torch

from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.collective_log import first_difference
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.contracts.collectives.operations import LIMIT, SIZES
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks


@contract("Ranks are numbered from 0.", grid("{size} ranks", size=SIZES))
def ranks_are_numbered(impl: type[Collectives], case: Case) -> None:
    found = on_ranks(case.size, lambda group: (group.rank, group.size, group.is_broken), LIMIT, impl)
    expect_equal("rank, size, is_broken", found, [(rank, case.size, False) for rank in range(case.size)])


@contract("Groups of different names in one store are apart.", EXAMPLE)
def groups_are_apart(impl: type[Collectives], case: Case) -> None:
    """Four ranks in two rows and two columns, numbered row by row."""
    from torch.distributed import HashStore

    store = HashStore()

    def sums(world: Collectives) -> tuple[int, int]:
        row, column = divmod(world.rank, 2)
        in_row = impl(store, column, 2, LIMIT, f"row{row}")
        in_column = impl(store, row, 2, LIMIT, f"column{column}")
        x = torch.tensor([10**world.rank])
        return int(in_row.all_reduce(x)), int(in_column.all_reduce(x))

    expected = [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]
    expect_equal("sums over the row and the column", on_ranks(4, sums, LIMIT, impl), expected)


CALLS = table(
    "op",
    ("a sum", "all_reduce"),
    ("a gather", "all_gather"),
    ("a part of a sum", "reduce_scatter"),
    ("rows for each", "all_to_all"),
    ("a broadcast", "broadcast"),
)


@contract(
    "`meanwhile` is called before the result is waited for, and may run operations of the group.", CALLS
)
def other_work_is_done_meanwhile(impl: type[Collectives], case: Case) -> None:
    """Rank 1 does not come before `meanwhile` of rank 0 was called, or a second has passed."""
    from threading import Event

    is_called = Event()
    x = torch.arange(4).view(2, 2)
    arguments = ([1, 1], [1, 1]) if case.op == "all_to_all" else ()

    def call(group: Collectives) -> list[Any]:
        sums: list[int] = []

        def meanwhile() -> None:
            group.meanwhile = None
            is_called.set()
            sums.append(int(group.all_reduce(torch.tensor(10**group.rank))))

        group.meanwhile = meanwhile
        late.append(group.rank == 1 and not is_called.wait(1.0))
        result = getattr(group, case.op)(x + 4 * group.rank, *arguments)
        group.meanwhile = None
        return [*sums, result.tolist()]

    late: list[bool] = []
    alone = on_ranks(
        2, lambda group: getattr(group, case.op)(x + 4 * group.rank, *arguments).tolist(), LIMIT, impl
    )
    for found, expected in zip(on_ranks(2, call, LIMIT, impl), alone):
        expect_equal("the result", found[-1], expected)
        expect_equal("the sums that were computed meanwhile", found[:-1], [11])
        expect_equal("rank 1 waited in vain for `meanwhile` of rank 0", any(late), False)


@contract("The log has an entry for each operation: its number, name, group, shape, dtype and caller.", CALLS)
def operations_are_logged(impl: type[Collectives], case: Case) -> None:
    def call(group: Collectives) -> list[tuple[object, ...]]:
        x = torch.ones(2, 3, dtype=torch.float16)
        group.broadcast(x)
        arguments = ([1, 1], [1, 1]) if case.op == "all_to_all" else ()
        getattr(group, case.op)(x, *arguments)
        return [tuple(entry) for entry in group.log.entries]

    shape = (3,) if case.op == "all_to_all" else (2, 3)  # the number of rows may differ by rank
    for entries in on_ranks(2, call, LIMIT, impl):
        expect_equal("entries", len(entries), 2)
        expect_equal("the entry", entries[1][:-1], (2, case.op, "tp", shape, "float16"))
        expect_true("its caller is outside", str(entries[1][-1]).startswith("groups.py:"), entries[1][-1])


@contract("The logs name the first operation in which two ranks differ.", EXAMPLE)
def logs_name_the_first_difference(impl: type[Collectives], case: Case) -> None:
    def call(group: Collectives) -> list[Any]:
        _differ(group)
        return list(group.log.entries)

    logs = on_ranks(2, call, 1.0, impl)
    difference = first_difference(logs) or "none"
    for text in ("#2", "rank 0: #2 all_reduce", "rank 1: #2 broadcast"):
        expect_true(f"{text!r} is in it", text in difference, difference)


def _differ(group: Collectives) -> None:
    x = torch.ones(3)
    group.all_reduce(x)
    try:
        group.all_reduce(x) if group.rank == 0 else group.broadcast(x, 1)
    except RuntimeError:
        return  # the library may detect it


@contract("A rank that ends makes operations of the others raise RuntimeError: the group is broken.", EXAMPLE)
def the_end_of_a_rank_breaks_the_group(impl: type[Collectives], case: Case) -> None:
    def wait(group: Collectives) -> bool:
        if group.rank == 1:
            return True
        expect_raises("all_reduce without rank 1", RuntimeError, group.all_reduce, torch.ones(2))
        return group.is_broken

    expect_equal("is_broken", on_ranks(2, wait, LIMIT, impl, ends_together=False), [True, True])


@contract("A rank that does not arrive in time has the same effect.", EXAMPLE)
def a_late_rank_breaks_the_group(impl: type[Collectives], case: Case) -> None:
    from threading import Event

    is_over = Event()

    def wait(group: Collectives) -> bool:
        if group.rank == 1:
            is_over.wait(LIMIT)
            return True
        try:
            expect_raises("all_reduce without rank 1", RuntimeError, group.all_reduce, torch.ones(2))
        finally:
            is_over.set()
        return group.is_broken

    expect_equal("is_broken", on_ranks(2, wait, 1.0, impl), [True, True])


@contract(
    "A rank that leaves breaks the group. The others may form one without it, numbered anew, with the same "
    "time limit and an empty log.",
    EXAMPLE,
)
def ranks_form_a_group_without_one(impl: type[Collectives], case: Case) -> None:
    """An implementation may leave both out."""
    from torch.distributed import HashStore

    if impl.leave is Collectives.leave:
        return
    store = HashStore()

    def go_on(group: Collectives) -> tuple[Any, ...]:
        number = group.rank
        if number == 0:
            group.leave()
            return ()
        expect_raises("all_reduce without rank 0", RuntimeError, group.all_reduce, torch.ones(2))
        group.leave()
        is_out = group.is_broken
        group.rejoin(store, number - 1, 2, 0.5)
        time.sleep(0.7 * (number - 1))  # longer than joining may take
        gathered = group.all_gather(torch.tensor([number])).tolist()
        return is_out, group.is_broken, group.rank, group.size, gathered, len(group.log.entries)

    found = on_ranks(3, go_on, LIMIT, impl)
    for rank in (0, 1):
        expect_equal("broken before and after, rank, size, numbers, length of the log", found[rank + 1],
                     (True, False, rank, 2, [1, 2], 1))  # fmt: skip
