"""The contract of Collectives, and the log of calls."""

from __future__ import annotations

import pytest
import torch

from reference.collectives import Collectives
from shared.parallel.alone import ALONE
from shared.parallel.collective_log import first_difference
from tests.parallel.threads import on_ranks

SIZES = (2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_adds_in_float32_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    parts = [of_rank(rank, (7, 5), dtype) for rank in range(size)]
    total = parts[0].to(torch.promote_types(dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    for result in on_ranks(size, lambda tp: tp.all_reduce(parts[tp.rank])):
        assert result.dtype == dtype
        assert torch.equal(result, total.to(dtype))
    assert torch.equal(parts[0], of_rank(0, (7, 5), dtype))  # no argument is changed


@pytest.mark.parametrize("size", SIZES)
def test_gather_and_scatter(size: int) -> None:
    parts = [of_rank(rank, (2 * size, 3), torch.float32) for rank in range(size)]
    total = sum(parts[1:], parts[0])
    for result in on_ranks(size, lambda tp: tp.all_gather(parts[tp.rank])):
        assert torch.equal(result, torch.cat(parts))
    for rank, result in enumerate(on_ranks(size, lambda tp: tp.reduce_scatter(parts[tp.rank]))):
        assert torch.equal(result, total[2 * rank : 2 * rank + 2])
    transposed = on_ranks(size, lambda tp: tp.all_gather(parts[tp.rank].T))  # not contiguous
    assert torch.equal(transposed[0], torch.cat([part.T for part in parts]))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_with_uneven_and_empty_parts(size: int) -> None:
    counts = [[(sender + 2 * receiver) % 3 for receiver in range(size)] for sender in range(size)]
    counts[0] = [0] * size

    def exchange(tp: Collectives) -> torch.Tensor:
        send, receive = counts[tp.rank], [counts[sender][tp.rank] for sender in range(size)]
        rows = [10 * tp.rank + to for to in range(size) for _ in range(send[to])]
        return tp.all_to_all(torch.tensor(rows, dtype=torch.int64).view(-1, 1), send, receive)

    for rank, received in enumerate(on_ranks(size, exchange)):
        expected = [10 * sender + rank for sender in range(size) for _ in range(counts[sender][rank])]
        assert received.flatten().tolist() == expected


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_and_messages(source: int) -> None:
    parts = [of_rank(rank, (4,), torch.bfloat16) for rank in range(2)]
    for result in on_ranks(2, lambda tp: tp.broadcast(parts[tp.rank], source)):
        assert torch.equal(result, parts[source])

    def pass_on(tp: Collectives) -> torch.Tensor:
        if tp.rank == source:
            tp.send(parts[source], 1 - source)
            return parts[source]
        return tp.receive(torch.empty(4, dtype=torch.bfloat16), source)

    for result in on_ranks(2, pass_on):
        assert torch.equal(result, parts[source])


def test_one_rank_alone() -> None:
    x = of_rank(0, (2, 3), torch.bfloat16)
    assert (ALONE.rank, ALONE.size) == (0, 1)
    for result in (
        ALONE.all_reduce(x),
        ALONE.all_gather(x),
        ALONE.reduce_scatter(x),
        ALONE.broadcast(x),
        ALONE.all_to_all(x, [2], [2]),
    ):
        assert torch.equal(result, x)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    def leave_early(tp: Collectives) -> str | None:
        if tp.rank == 1:
            return None
        with pytest.raises(RuntimeError) as caught:
            tp.all_reduce(torch.ones(1))
        return str(caught.value)

    assert on_ranks(2, leave_early, seconds=1.0)[0]


def test_the_log_names_the_first_call_that_differs() -> None:
    def differ(tp: Collectives) -> Collectives:
        tp.all_reduce(torch.ones(2))
        tp.all_gather(torch.ones(2, 3))
        if tp.rank == 0:
            tp.log.add("broadcast", tp.name, torch.ones(4))
        else:
            tp.log.add("all_reduce", tp.name, torch.ones(4))
        return tp

    logs = [tp.log.entries for tp in on_ranks(2, differ)]
    found = first_difference(logs)
    assert found is not None
    assert "from collective #3 on" in found
    assert "rank 0: #3 broadcast of float32 [4] in tp (test_collectives.py:" in found
    assert "rank 1: #3 all_reduce of float32 [4]" in found
    assert first_difference([list(log)[:2] for log in logs]) is None
    missing = first_difference([list(logs[0]), list(logs[1])[:2]])
    assert missing is not None
    assert "rank 1: did not call it" in missing
