"""Times a bare function on growing sizes, beside this project's implementation and the roofline bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.bench.ceilings import measure_ceilings, median_time
from diptych.shared.tools.bench.step_cost import Ceilings
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.kernels.kernel_report import Timing, Verdict
from diptych.shared.tools.conformance.kernels.one_call import limited
from diptych.shared.tools.conformance.kernels.problem import Convention, Like, Problem
from diptych.shared.tools.conformance.kernels.rank_processes import RankProcesses
from diptych.shared.tools.conformance.kernels.run import SECONDS, check_problem


def time_sizes(
    function: Callable[..., Any],
    like: Like,
    convention: Convention,
    limit: float = SECONDS,
    ceilings: Ceilings | None = None,
) -> Iterator[tuple[Verdict, Timing | None]]:
    """Each timed size: first its error, then seconds of the function and of what it is compared with.
    `limit`: seconds that a call may take."""
    device = check_device()
    ranks = function if isinstance(function, RankProcesses) else None
    for case in like.timed(device.type if ranks is None else ranks.device_type):
        problem = like.make(case, convention.takes_scale)
        verdict = check_problem(function if ranks else limited(function, limit), like, convention, problem)
        if verdict.refusal is not None or (verdict.failure and ("raised" in verdict.failure or ranks)):
            yield verdict, None
            if verdict.ends_check:
                return
            continue
        if ranks is not None:
            yield verdict, _time_ranks(ranks, convention, problem)
            continue
        if ceilings is None:
            ceilings = measure_ceilings(device, problem.dtype)
        made = convention.build(problem)
        with torch.inference_mode():
            seconds = median_time(partial(function, *made.args, **made.kwargs), device)
            ours = None if problem.ours is None else median_time(problem.ours, device)
        bound = max(problem.num_bytes / ceilings.bandwidth, problem.flops / ceilings.matrix_rate)
        yield verdict, Timing(problem.name, problem.size, seconds, ours, bound)


def _time_ranks(ranks: RankProcesses, convention: Convention, problem: Problem) -> Timing:
    """Beside torch.distributed's sum. The rate of the links is not measured, so there is no bound."""
    seconds = ranks.time(problem["x"], convention.library)
    theirs = ranks.time(problem["x"], "torch", "torch.distributed:all_reduce")
    return Timing(problem.name, problem.size, seconds, theirs, None)
