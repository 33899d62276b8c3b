"""Times a bare function on growing sizes, beside this project's implementation and the roofline bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from shared.bench.ceilings import measure_ceilings, median_time
from shared.bench.step_cost import Ceilings
from shared.conformance.device import check_device
from shared.conformance.kernels.conventions import Convention
from shared.conformance.kernels.problem import Like
from shared.conformance.kernels.run import Timing, Verdict, check_problem


def time_sizes(
    function: Callable[..., Any], like: Like, convention: Convention, ceilings: Ceilings | None = None
) -> Iterator[tuple[Verdict, Timing | None]]:
    """Each timed size: first its error, then seconds of the function and of this project's kernel."""
    device = check_device()
    for case in like.timed(device.type):
        problem = like.make(case, convention.takes_scale)
        if ceilings is None:
            ceilings = measure_ceilings(device, problem.dtype)
        verdict = check_problem(function, like, convention, problem)
        if verdict.refusal is not None or (verdict.failure and "raised" in verdict.failure):
            yield verdict, None
            continue
        made = convention.build(problem)
        with torch.inference_mode():
            seconds = median_time(partial(function, *made.args, **made.kwargs), device)
            ours = None if problem.ours is None else median_time(problem.ours, device)
        bound = max(problem.num_bytes / ceilings.bandwidth, problem.flops / ceilings.matrix_rate)
        yield verdict, Timing(problem.name, problem.size, seconds, ours, bound)
