"""`diptych check kernel --like all_reduce`: a function over three processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.kernels import rank_processes
from diptych.shared.tools.conformance.kernels.collective_likes import all_reduce_like
from diptych.shared.tools.conformance.kernels.conventions import convention_of
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.rank_processes import RankProcesses
from diptych.shared.tools.conformance.kernels.run import check_arguments, check_kernel
from tests.kernel_check import reductions
from tests.planted import Bug, Bugs

LIKE = all_reduce_like()
WRONG = Bugs("all-reduce", finder="check kernel")
for _name, (_convention, _says) in {
    "own_first": ("torch", "the sum on rank 2: expected the bits of rank 0"),
    "order_of_arrival": ("torch", "the sum: expected the bits of the first run: additions in a fixed order"),
    "last_bit": ("torch", "the sum on rank 1: expected the bits of rank 0"),
    "without_the_last": ("torch", "the input of the last rank is missing in the sum"),
    "stale": ("torch", "a buffer is stale: the sum is that of the call before"),
    "stale_peers": ("torch", "the inputs of other ranks are those of the call before"),
    "reused_buffer": ("torch-functional", "a result is overwritten by a later call"),
    "input_modified": ("torch-functional", "all ranks: the input, or memory beside it, is modified"),
    "only_rank_0": ("torch", "only rank 0 has the sum"),
    "mean": ("torch", "divided by the number of ranks"),
    "one_element_beyond": ("torch", "memory beside the tensor is modified"),
    "asserts_dense": (
        "torch",
        "a layout that is not dense: all ranks: raises AssertionError: x must be contiguous",
    ),
    "dense_memory": ("torch", "strides or the address are ignored"),
    "one_refuses": ("torch", "rank 1: ValueError: not on this rank"),
    "one_raises": ("torch", "rank 2: raises KeyError: 'lost'"),
    "one_ends": ("torch", "rank 1: the process has ended with exit code 3"),
    "one_hangs": ("torch", "the call: expected a return within"),
    "returns_nothing": ("vllm", "returns NoneType, not a tensor"),
    "float32_result": ("vllm", "all ranks: dtype of out: float32, expected that of the input"),
}.items():
    WRONG.add(_name, getattr(reductions, _name), where=_convention, says=_says)


def cases_of(*texts: str) -> tuple[Case, ...]:
    return tuple(case for case in LIKE.cases if case.name in texts)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses("", 3, seconds=20.0) as ranks:
        yield ranks


def check(ranks: RankProcesses, name: str, convention: str = "torch", *texts: str) -> Report:
    ranks.target = f"{reductions.__name__}:{name}"
    cases = cases_of(*texts) if texts else None
    return check_kernel(ranks, name, LIKE, convention_of("all_reduce", convention), cases)


def test_right_functions_hold(ranks: RankProcesses) -> None:
    few = ("3 x 63, float32", "0 x 64, bfloat16", "5 x 96, slices of wider rows, float16")
    for name, convention in (
        ("in_place", "torch"),
        ("functional", "torch-functional"),
        ("default_group", "vllm"),
    ):
        report = check(ranks, name, convention, *few)
        assert report.status == 0, report.failing
        assert report.num_refused == 0
        assert all(all(verdict.reports.values()) for verdict in report.verdicts)
    assert "3 processes over gloo" in report.device


def test_refused_layouts_are_no_failures(ranks: RankProcesses) -> None:
    report = check(
        ranks, "refuses_slices", "torch", "3 x 63, float32", "5 x 96, slices of wider rows, float32"
    )
    assert (report.status, report.num_refused) == (0, 1)
    assert "must be contiguous" in str(report.verdicts[1].refusal)


@WRONG.found_by()
def test_planted_faults_are_found_and_named(
    bug: Bug, ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    monkeypatch.setattr(rank_processes, "GRACE_SECONDS", 0.3)
    slices = "5 x 96, slices of wider rows, float32"
    case = {"dense_memory": slices, "asserts_dense": slices, "float32_result": "3 x 63, bfloat16"}
    with monkeypatch.context() as patch:
        if bug.name == "one_hangs":
            patch.setattr(ranks, "seconds", 0.5)
        report = check(ranks, bug.name, bug.where, case.get(bug.name, "3 x 63, float32"))
    said = [str(verdict.failure) for verdict in report.failing] + report.names
    return {"check kernel": "; ".join(said)} if report.status == 1 else {}


@pytest.mark.full
def test_every_case_holds_with_two_and_with_four_ranks() -> None:
    for num_ranks in (2, 4):
        like = all_reduce_like(num_ranks)
        target = f"{reductions.__name__}:in_place"
        with RankProcesses(target, num_ranks) as ranks:
            report = check_kernel(ranks, target, like, convention_of("all_reduce", "torch"))
            assert report.status == 0, report.failing
            assert report.num_refused == 0
            assert ranks.time(torch.ones(num_ranks, 1, 4, 64), "torch") > 0
            children = {each.name for each in multiprocessing.active_children()}
            assert {f"rank {rank}" for rank in range(num_ranks)} <= children
        assert not {each.name for each in multiprocessing.active_children()} & {"rank 0", "rank 1"}


def test_calls_that_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        all_reduce_like(1)
    target = f"{reductions.__name__}:functional"
    with pytest.raises(ValueError, match=r"takes \(x.*convention torch calls all_reduce\(tensor, group=\)"):
        check_arguments(target, LIKE, convention_of("all_reduce", "torch"), LIKE.cases)
