"""A rank alone, and the log of calls. The contract of Collectives is in
shared/tools/conformance/contracts."""

from __future__ import annotations

import sys

import pytest
import torch

from diptych.shared import registry
from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.collective_log import first_difference
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks


def test_one_rank_alone() -> None:
    x = torch.randn(2, 3).to(torch.bfloat16)
    assert (ALONE.rank, ALONE.size) == (0, 1)
    for result in (
        ALONE.all_reduce(x),
        ALONE.all_gather(x),
        ALONE.reduce_scatter(x),
        ALONE.broadcast(x),
        ALONE.all_to_all(x, [2], [2]),
    ):
        assert torch.equal(result, x)


def test_the_log_names_the_first_call_that_differs() -> None:
    def differ(tp: Collectives) -> Collectives:
        tp.all_reduce(torch.ones(2))
        tp.all_gather(torch.ones(2, 3))
        if tp.rank == 0:
            tp.log.add("broadcast", "tp", torch.ones(4))
        else:
            tp.log.add("all_reduce", "tp", torch.ones(4))
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


def test_the_first_error_of_a_rank_is_raised() -> None:
    """The other ranks fail as well, for want of it."""

    def fail(tp: Collectives) -> None:
        if tp.rank == 1:
            raise ValueError("of rank 1")
        tp.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="of rank 1"):
        on_ranks(2, fail)


def test_the_caller_is_no_method_of_collectives() -> None:
    """Also for an implementation in a file of any name, and for one that calls another."""

    class Mine(registry.load("collectives", "reference")):  # type: ignore[misc]
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return super().all_reduce(x)

    def layer(tp: Collectives) -> int:
        tp.all_reduce(torch.ones(1))
        return sys._getframe().f_lineno - 1

    def called(tp: Collectives) -> tuple[str, int]:
        line = layer(tp)
        return tp.log.entries[-1].caller, line

    for caller, line in on_ranks(2, called, impl=Mine):
        assert caller == f"test_collectives.py:{line}"
