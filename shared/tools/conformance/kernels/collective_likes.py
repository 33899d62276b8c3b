"""All-reduce: each rank is a process, and successive calls follow without a pause."""

from __future__ import annotations

from functools import partial

import torch

from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, type_name
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Suspect
from diptych.shared.tools.conformance.kernels.rank_worker import LAYOUTS

DEFAULT_RANKS = 3  # the fewest whose sum depends on the order
NUM_CALLS = 3
SHAPES = ((1, 1), (0, 64), (3, 63), (1, 127), (2, 129), (1, 1000), (7, 1024), (33, 257), (1, 16384))


def _name(num_tokens: int, size: int, dtype: torch.dtype, layout: str, num_calls: int) -> str:
    return f"{num_tokens} x {size}{', ' * bool(layout)}{layout}, {type_name(dtype)}"


SUMS: tuple[Case, ...] = table(
    "num_tokens size dtype layout num_calls",
    *((*shape, dtype, "", NUM_CALLS) for dtype in FLOAT_TYPES for shape in SHAPES),
    *((5, 96, dtype, layout, NUM_CALLS) for dtype in FLOAT_TYPES for layout in LAYOUTS[1:]),
    name=_name,
)


def timed_sums(device: str) -> tuple[Case, ...]:
    dtype, size = (torch.bfloat16, 4096) if device == "cuda" else (torch.float32, 1024)
    rows = ((n, size, dtype, "", 1) for n in (1, 16, 128, 1024))
    return table("num_tokens size dtype layout num_calls", *rows, name=f"{{num_tokens}} x {size}")


def make_all_reduce(case: Case, takes_scale: bool, seed: int = 0, *, num_ranks: int) -> Problem:
    """x, out [num_ranks, num_calls, num_tokens, size], on the CPU. The variance of the sums is about the same
    for any number of ranks."""
    generator = torch.Generator().manual_seed(11 + seed)
    shape = (num_ranks, case.num_calls, case.num_tokens, case.size)
    x = (torch.randn(shape, generator=generator) * (DEFAULT_RANKS / num_ranks) ** 0.5).to(case.dtype)
    return Problem(
        case.name, {"x": x}, {"layout": case.layout, "late": None}, _of_inputs, "sum over ranks", case.dtype,
        case.num_tokens * case.size, 0.0, 0.0, limit=lambda _: limit_of_sum(num_ranks, case.dtype),
    )  # fmt: skip


def limit_of_sum(num_ranks: int, dtype: torch.dtype) -> Tolerance:
    """The row of the table is for three ranks; with more there are more additions, each of which rounds."""
    row, factor = tolerance("sum over ranks", dtype), max(1.0, (num_ranks - 1) / (DEFAULT_RANKS - 1))
    return Tolerance(factor * row.atol, factor * row.rtol, factor * row.rms, row.reason)


def _summed(x: torch.Tensor, mistake: str = "") -> dict[str, torch.Tensor]:
    x = x.double()
    total = x.sum(0)
    before = torch.full_like(x, torch.nan)  # the first call has none before it
    before[:, 1:] = x[:, :-1]
    results = {
        "": total,
        "mean": total / len(x),
        "maximum": x.amax(0),
        "first": total - x[0],
        "last": total - x[-1],
        "product": x.prod(0),
        "stale": before.sum(0),
        "overwritten": total[-1:].expand_as(total),
    }
    if mistake in results:
        return {"out": results[mistake].expand_as(x).clone()}
    of_each_rank = {
        "own only": x,
        "own twice": total + x,
        "own missing": total - x,
        "first rank only": torch.cat((total[None], x[1:])),
        "stale peers": x + before.sum(0) - before,
    }
    return {"out": of_each_rank[mistake]}


def _of_inputs(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    return _summed(problem["x"], mistake)


def in_order(problem: Problem) -> torch.Tensor:
    """The sum in float32 in the order of ranks, rounded once."""
    total = problem["x"][0].float()
    for part in problem["x"][1:]:
        total = total + part.float()
    return total.to(problem.dtype).expand_as(problem["x"])


def expect_same_sums(what: str, out: torch.Tensor, of_first_variant: torch.Tensor) -> None:
    """Raises `Mismatch` if a rank's bits differ from rank 0's, or from those of a run in which another rank
    was late."""
    for rank in range(1, len(out)):
        if num := _num_other(out[rank], out[0]):
            wrong = f"other bits in {num} of {out[0].numel()} elements"
            raise Mismatch(f"{what}: the sum on rank {rank}", "the bits of rank 0", wrong)
    if num := _num_other(out, of_first_variant):
        wrong = f"other bits in {num} of {out.numel()} elements"
        raise Mismatch(f"{what}: the sum", "the bits of the first run: additions in a fixed order", wrong)


def _num_other(a: torch.Tensor, b: torch.Tensor) -> int:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.contiguous().view(integer) != b.contiguous().view(integer)).sum())


SUSPECTS: dict[str, Suspect] = {
    name: partial(_of_inputs, mistake=mistake)
    for name, mistake in {
        "the input of rank 0 is missing in the sum": "first",
        "the input of the last rank is missing in the sum": "last",
        "the input of the rank itself is missing in the sum": "own missing",
        "the input of the rank itself is added twice": "own twice",
        "each rank returns its own input: nothing is summed": "own only",
        "only rank 0 has the sum, as in reduce": "first rank only",
        "the sum is divided by the number of ranks": "mean",
        "the maximum is taken, not the sum": "maximum",
        "the product is taken, not the sum": "product",
        "a buffer is stale: the sum is that of the call before": "stale",
        "a buffer is stale: the inputs of other ranks are those of the call before": "stale peers",
        "a buffer is used again: a result is overwritten by a later call": "overwritten",
    }.items()
}


def all_reduce_like(num_ranks: int = DEFAULT_RANKS) -> Like:
    """Raises `ValueError` for fewer than two ranks."""
    if num_ranks < 2:
        raise ValueError(f"--ranks {num_ranks}: a sum over ranks needs at least 2")
    return Like(
        "all_reduce",
        "Each rank, a process, gets the sum of the tensors of all ranks.",
        "elements",
        SUMS,
        timed_sums,
        partial(make_all_reduce, num_ranks=num_ranks),
        SUSPECTS,
        ranks=num_ranks,
        beside="torch.distributed",
    )
