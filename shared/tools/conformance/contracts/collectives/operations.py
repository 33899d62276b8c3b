"""Clauses of collectives: what each operation returns. The ranks are threads, their tensors on the CPU."""

from __future__ import annotations

import time

import torch

from diptych.shared import registry
from diptych.shared.interfaces import Collectives, RMSNorm
from diptych.shared.tools.conformance.clauses.case import Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks

LIMIT = 10.0  # time limit of a group in seconds
SIZES = (2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
EACH_SIZE = grid("{size} ranks", size=SIZES)
EACH_DTYPE = grid("{size} ranks, {dtype}", size=SIZES, dtype=DTYPES)


def parts_of(case: Case, *shape: int) -> list[torch.Tensor]:
    """One tensor for each rank."""
    dtype = getattr(case, "dtype", torch.float32)
    scale = 1 if dtype.is_floating_point else 2**40
    generator = torch.Generator().manual_seed(case.size)
    return [(torch.randn(*shape, generator=generator) * scale).to(dtype) for _ in range(case.size)]


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = torch.float64 if dtype.is_floating_point else dtype
    return torch.stack(parts).to(wide).sum(dim=0).to(dtype)


def expect_sum(what: str, found: torch.Tensor, parts: list[torch.Tensor]) -> None:
    expected, dtype = total_of(parts), parts[0].dtype
    expect_equal(f"{what}, dtype", found.dtype, dtype)
    expect_close(
        what, found, expected, tolerance("sum over ranks", dtype) if dtype.is_floating_point else EXACT
    )


@contract("all_reduce is the sum over ranks, in the shape and dtype of its argument.", EACH_DTYPE)
def all_reduce_is_the_sum(impl: type[Collectives], case: Case) -> None:
    parts = parts_of(case, 7, 5)
    for found in on_ranks(case.size, lambda group: group.all_reduce(parts[group.rank]), LIMIT, impl):
        expect_sum("all_reduce", found, parts)
    transposed = on_ranks(case.size, lambda group: group.all_reduce(parts[group.rank].T), LIMIT, impl)
    expect_sum("all_reduce of a transposed tensor", transposed[0], [part.T for part in parts])


@contract("A sum has the same bits on every rank.", EACH_DTYPE)
def sums_have_the_same_bits(impl: type[Collectives], case: Case) -> None:
    parts = parts_of(case, 1000)
    found = on_ranks(case.size, lambda group: group.all_reduce(parts[group.rank]), LIMIT, impl)
    for rank in range(1, case.size):
        expect_equal(f"the sum on rank {rank}", found[rank], found[0])


@contract("all_reduce_add_and_norm adds the residual to the sum over ranks and norms it.", EACH_SIZE)
def the_sum_is_added_and_normed(impl: type[Collectives], case: Case) -> None:
    norm: RMSNorm = registry.load("layers", "reference").RMSNorm(5, 1e-6)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    *parts, residual = parts_of(Case("with a residual", size=case.size + 1), 7, 5)
    expected = norm.add_and_norm(total_of(parts), residual.clone())

    def call(group: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        return group.all_reduce_add_and_norm(parts[group.rank].clone(), residual.clone(), norm)

    for found in on_ranks(case.size, call, LIMIT, impl):
        for what, result, wanted in zip(("the norm", "the sum"), found, expected):
            expect_close(what, result, wanted, tolerance("sum over ranks", torch.float32))


@contract("barrier returns when all ranks have called it.", EACH_SIZE)
def a_barrier_waits_for_all_ranks(impl: type[Collectives], case: Case) -> None:
    arrived: list[int] = []

    def call(group: Collectives) -> int:
        if group.rank == case.size - 1:
            time.sleep(0.05)
        arrived.append(group.rank)
        group.barrier()
        return len(arrived)

    expect_equal("ranks that had called it", on_ranks(case.size, call, LIMIT, impl), [case.size] * case.size)


@contract("No operation changes its arguments.", EACH_SIZE)
def arguments_stay(impl: type[Collectives], case: Case) -> None:
    parts, before = parts_of(case, 2 * case.size, 3), parts_of(case, 2 * case.size, 3)

    def call_all(group: Collectives) -> None:
        x, counts = parts[group.rank], [2] * case.size
        group.all_reduce(x), group.all_gather(x), group.reduce_scatter(x)
        group.all_to_all(x, counts, counts), group.broadcast(x)

    on_ranks(case.size, call_all, LIMIT, impl)
    for rank in range(case.size):
        expect_equal(f"the argument of rank {rank}", parts[rank], before[rank])


@contract("all_gather concatenates the tensors of all ranks, in their order.", EACH_DTYPE)
def all_gather_keeps_the_order(impl: type[Collectives], case: Case) -> None:
    parts = parts_of(case, 4, 3)
    for found in on_ranks(case.size, lambda group: group.all_gather(parts[group.rank]), LIMIT, impl):
        expect_equal("all_gather", found, torch.cat(parts))
    transposed = on_ranks(case.size, lambda group: group.all_gather(parts[group.rank].T), LIMIT, impl)
    expect_equal("all_gather of a transposed tensor", transposed[0], torch.cat([part.T for part in parts]))


@contract("reduce_scatter gives rank r part r of the sum over ranks.", EACH_DTYPE)
def reduce_scatter_gives_each_rank_its_part(impl: type[Collectives], case: Case) -> None:
    parts = parts_of(case, 2 * case.size, 3)
    found = on_ranks(case.size, lambda group: group.reduce_scatter(parts[group.rank]), LIMIT, impl)
    for rank in range(case.size):
        expect_sum(f"the part of rank {rank}", found[rank], [part[2 * rank : 2 * rank + 2] for part in parts])


@contract(
    "all_to_all gives each rank its rows from all ranks, in their order; counts may differ and be 0.",
    grid("{size} ranks, rank {silent} sends nothing", size=SIZES, silent=(0, 1)),
)
def all_to_all_with_uneven_counts(impl: type[Collectives], case: Case) -> None:
    ranks = range(case.size)
    counts = [[0 if sender == case.silent else (sender + 2 * to) % 3 for to in ranks] for sender in ranks]

    def exchange(group: Collectives) -> torch.Tensor:
        own = group.rank
        rows = [10 * own + to for to in ranks for _ in range(counts[own][to])]
        receive = [counts[sender][own] for sender in ranks]
        return group.all_to_all(torch.tensor(rows, dtype=torch.int64).view(-1, 1), counts[own], receive)

    for rank, found in enumerate(on_ranks(case.size, exchange, LIMIT, impl)):
        expected = [10 * sender + rank for sender in ranks for _ in range(counts[sender][rank])]
        expect_equal(f"rows of rank {rank}", found.flatten().tolist(), expected)


@contract(
    "broadcast gives every rank the tensor of its source.",
    grid("{size} ranks, from {source}, {dtype}", size=SIZES, source=(0, 1), dtype=DTYPES),
)
def broadcast_comes_from_its_source(impl: type[Collectives], case: Case) -> None:
    parts = parts_of(case, 6, 2)
    found = on_ranks(case.size, lambda group: group.broadcast(parts[group.rank].T, case.source), LIMIT, impl)
    for rank in range(case.size):
        expect_equal(f"on rank {rank}", found[rank], parts[case.source].T)


@contract(
    "receive returns what the source sends, message after message; the sender may overwrite it.",
    grid("{size} ranks", size=SIZES),
)
def messages_arrive_in_order(impl: type[Collectives], case: Case) -> None:
    """A ring: each rank gets two tensors of the rank before it."""
    parts = parts_of(case, 4, 3)

    def around(group: Collectives) -> list[torch.Tensor]:
        found = []
        for factor in (1, 2):
            x = parts[group.rank].T * factor
            for sender in range(case.size):
                if group.rank == sender:
                    group.send(x, (sender + 1) % case.size)
                    x.zero_()
                elif group.rank == (sender + 1) % case.size:
                    found.append(group.receive(parts[0].T, sender))
        return found

    for rank, (first, second) in enumerate(on_ranks(case.size, around, LIMIT, impl)):
        sent = parts[(rank - 1) % case.size].T
        expect_equal("the first message", first, sent)
        expect_equal("the second message", second, sent * 2)
