"""Errors of one sign: by a wrong factor, or by sums of low precision."""

from __future__ import annotations

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch, error_rms
from diptych.shared.tools.conformance.kernels.functions import Mistake
from diptych.shared.tools.conformance.kernels.one_call import BIAS, PRECISION, Results
from diptych.shared.tools.conformance.kernels.problem import Problem

BIAS_SIGMAS = 6.0
HALF_UNIT = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
"""The largest relative error of one rounding."""


def check_bias(problem: Problem, results: Results) -> None:
    """Raises `Mismatch` if all results are too large or too small by the same share, beyond what roundings
    to the type of the output can cause: one of each element, and one of a factor of each row. Equal values
    count once: they are rounded alike. The constant `half_unit` is of a problem with coarser roundings."""
    for name, truth in problem.expected.items():
        half_unit = problem.constants.get("half_unit", HALF_UNIT.get(results[name].dtype))
        if half_unit is None or problem.kind == "draws":
            continue
        places, values = problem.distinct[name]
        got = results[name].detach().cpu().double().flatten()[places]
        if not (usable := torch.isfinite(got)).all():
            got, values = got[usable], values[usable]
        if len(values) < 64:
            continue
        square = values.square().sum()
        slope = float((got * values).sum() / square - 1)
        rows = as_rows(truth.nan_to_num(0.0)).square().sum(-1)
        of_rows = float(rows.square().sum() / rows.sum().square())
        of_elements = float(values.pow(4).sum() / square.square())
        deviation = half_unit / 3**0.5 * (of_elements + of_rows) ** 0.5
        if abs(slope) > BIAS_SIGMAS * deviation and abs(slope) > half_unit / 4:
            size = f"{100 * abs(slope):.2g} % too {'large' if slope > 0 else 'small'}"
            raise Mismatch(
                f"all elements of {name} are {size}, {abs(slope / deviation):.0f} standard deviations"
            )


def is_biased(problem: Problem, results: Results) -> bool:
    try:
        check_bias(problem, results)
    except Mismatch:
        return True
    return False


def has_few_rows(problem: Problem) -> bool:
    """Whether the results have so few rows that one factor may correct all of them by chance."""
    return problem.kind != "draws" and all(each.shape[:1].numel() < 4 for each in problem.expected.values())


def is_nearer(problem: Problem, wrong: Results, results: Results) -> bool:
    """Whether the results are closer to those of a mistake than half their distance to the exact ones."""
    for name, truth in problem.expected.items():
        mistaken = torch.where(torch.isnan(wrong[name]), truth, wrong[name])
        if not error_rms(results[name], mistaken) < 0.5 * error_rms(results[name], truth):
            return False
    return True


def kinds_of_bias(problem: Problem, results: Results) -> list[Mistake]:
    """A factor, if it is the same in each row and corrects all elements; otherwise lost precision. Of few
    rows it can be both. None: there is no slope."""
    factors = [_factor_of(results[name].cpu().double(), truth) for name, truth in problem.expected.items()]
    if any(factor is None for factor in factors):
        return [Mistake(PRECISION)] if is_biased(problem, results) else []
    return [Mistake(BIAS), Mistake(PRECISION)] if has_few_rows(problem) else [Mistake(BIAS)]


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[num_rows, size]: a vector is one row, and so is a single number."""
    return x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)


def _factor_of(got: torch.Tensor, truth: torch.Tensor) -> float | None:
    """The factor of all rows (the last dimension) alike; None: there is none."""
    rows, exact = as_rows(got), as_rows(truth)
    usable = torch.isfinite(rows).all(-1) & torch.isfinite(exact).all(-1) & (exact.norm(dim=-1) > 0)
    if not usable.any():
        return None
    rows, exact = rows[usable], exact[usable]
    slope = float((rows * exact).sum() / exact.square().sum())
    if abs(slope - 1) < 1e-4 or not 0.5 < slope < 2:
        return None
    of_rows = (rows * exact).sum(-1) / exact.square().sum(-1)
    error = float((rows / slope - exact).norm() / exact.norm())
    is_same = float((of_rows - slope).abs().median()) < 0.25 * abs(slope - 1)
    return slope if is_same and error < 0.5 * abs(slope - 1) + 2e-3 else None
