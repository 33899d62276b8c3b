"""Patterns of wrong results that name no formula: constants, small values replaced by zero, tails, and sizes
that are no multiples of a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.tools.conformance.kernels.functions import Mistake
from diptych.shared.tools.conformance.kernels.one_call import Conduct
from diptych.shared.tools.conformance.kernels.problem import Problem, Tensors

BLOCKS = (128, 64, 32, 16, 8, 4, 2)
DROPPED = "small results are replaced by zero"
NATIVE = "native results"
SMALLEST, NUM_DROPPED = 2.0**-14, 8
"""Smaller ones may underflow; single ones may be rounded to zero."""
NUM_HOLDING = 3
"""Cases that must hold before sizes are said to be the difference."""


def pattern_of(problem: Problem, results: Tensors) -> list[Mistake]:
    for name, truth in problem.expected.items():
        limit, got = problem.tolerance_of(name), results[name].detach().cpu().double()
        wrong = ~((got - truth).abs() <= limit.allowed(truth)) & torch.isfinite(truth)
        if not wrong.any():
            continue
        is_draws = problem.kind == "draws"
        if is_draws and bool((got.amax(-1) == 1).all()):
            return [Mistake("the output is constant")]
        if is_draws and bool((truth[wrong] == 0).all()):
            return [Mistake("tokens are drawn that the filters exclude")]
        if not is_draws and got.numel() >= 8 and bool((got == got.flatten()[0]).all()):
            return [Mistake("the output is constant")]
        if _drops_small(got, truth, wrong):
            return [Mistake(DROPPED)]
        if not is_draws and (tail := _tail(wrong)):
            return [Mistake(tail)]
    return []


def check_small(problem: Problem, results: Tensors) -> None:
    """Raises `Conduct` if results below a limit are all zero, where a native computation is near them: its
    largest error may allow that. The constant NATIVE gives its results from the exact ones. Integers and
    numbers of 8 bits are rounded to zero rightly."""
    native = problem.constants.get(NATIVE)
    near = {} if native is None else native(problem.expected)
    for name, half in near.items():
        dtype = problem.dtype_of(name)
        if not dtype.is_floating_point or dtype.itemsize == 1:
            continue
        truth, got = problem.expected[name], results[name].detach().cpu().double()
        is_near = (half.cpu().double() - truth).abs() <= 0.1 * truth.abs()
        dropped = (got == 0) & is_near & (truth.abs() > SMALLEST) & torch.isfinite(truth)
        if int(dropped.sum()) >= NUM_DROPPED and _drops_small(got, truth, dropped):
            raise Conduct(DROPPED, f"{int(dropped.sum())} of {name}")


def _drops_small(got: torch.Tensor, truth: torch.Tensor, wrong: torch.Tensor) -> bool:
    """Whether all wrong zeros are below a limit, and everything below it is zero."""
    dropped = (got == 0) & wrong
    if not dropped.any() or bool((got == 0).all()):
        return False
    largest = truth[dropped].abs().max()
    others = truth[(got != 0) & torch.isfinite(truth)].abs()
    return bool((others >= 0.9 * largest).all())


def _tail(wrong: torch.Tensor) -> str:
    """Wrong elements in the last rows, or the last columns, only."""
    if wrong.dim() < 2:
        return ""
    for dim, what in ((0, "rows"), (wrong.dim() - 1, "columns")):
        others = [each for each in range(wrong.dim()) if each != dim]
        is_wrong = wrong.any(dim=others) if others else wrong
        num, first = len(is_wrong), int(is_wrong.int().argmax())
        is_whole = bool(wrong.select(dim, num - 1).double().mean() > 0.5)
        is_many = dim == 0 or float(is_wrong.double().mean()) > 0.05
        if num >= 4 and is_many and first > num // 2 and bool(is_wrong[first:].all()) and is_whole:
            return f"the last {what} are wrong"
    return ""


def only_multiples(failing: Sequence[Problem], holding: Sequence[Problem]) -> str:
    """The block whose multiples hold, while all other sizes fail: of a dimension of an input, but not of
    its rows."""
    if len(holding) < NUM_HOLDING:
        return ""
    for name, tensor in failing[0].tensors.items():
        for dim in range(1, tensor.dim() if tensor.is_floating_point() else 0):
            sizes = [[each[name].shape[dim] for each in group] for group in (failing, holding)]
            for block in BLOCKS:
                if all(n % block for n in sizes[0]) and not any(n % block for n in sizes[1]):
                    return f"only some sizes are right: multiples of {block} of dimension {dim} of {name}"
    return ""
