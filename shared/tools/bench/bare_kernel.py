"""Times a bare function on growing sizes, beside this project's implementation and the roofline bound. The
clock is that of the check, not of the function's process, and results of timed calls are checked too."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch

from diptych.shared.tools.bench.ceilings import NUM_RUNS, call_times, measure_ceilings
from diptych.shared.tools.bench.step_cost import Ceilings
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.kernels.child_function import OVERWRITTEN, ChildFunction
from diptych.shared.tools.conformance.kernels.kernel_report import Timing, Verdict
from diptych.shared.tools.conformance.kernels.one_call import (
    Conduct,
    Results,
    check_form,
    check_values,
    holds,
    results_of,
    sentence,
)
from diptych.shared.tools.conformance.kernels.problem import Convention, Like, Problem, bytes_of
from diptych.shared.tools.conformance.kernels.rank_processes import RankProcesses
from diptych.shared.tools.conformance.kernels.run import as_function, check_problem

CACHE_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
"""The inputs of one pass have more bytes than a cache, if `MOST_SETS` sets can."""
MOST_SETS, FEWEST_SETS = 64, 4
DECIDED = 100.0
"""A logit so large that its row has one token."""
NUM_PASSES, NUM_CHECKED = 7, 2
BEYOND_CACHE = 128 * 2**20
"""Bytes of the inputs of a pass of which a GPU's cache has less than half."""
MEASURED = 1.25
"""A call may be so many times faster than the bound, whose ceilings are measured."""
LATE = "results of timed calls are computed after the clock has stopped"


class Passes(NamedTuple):
    """`seconds`: of one call, in the fastest pass: other work only adds time. `spread`: how far the quartiles
    of the passes are apart, over their median. `failure`: what is wrong with the result of a timed call.
    `num_bytes`: of the inputs of one pass."""

    seconds: float
    spread: float
    failure: str | None
    num_bytes: int = 0


def time_sizes(
    function: ChildFunction | RankProcesses,
    like: Like,
    convention: Convention,
    seed: int = 0,
    ceilings: Ceilings | None = None,
) -> Iterator[tuple[Verdict, Timing | None]]:
    """Each timed size: first its error, then seconds of the function and of what it is compared with."""
    device = check_device()
    ranks = function if isinstance(function, RankProcesses) else None
    for case in like.timed(device.type if ranks is None else ranks.device_type):
        problem = like.make(case, convention.takes_scale, seed)
        verdict = check_problem(as_function(function, 0.0), like, convention, problem)
        if verdict.refusal is not None or verdict.failure:
            yield verdict, None
            if verdict.ends_check:
                return
            continue
        if isinstance(function, RankProcesses):
            yield verdict, _time_ranks(function, convention, problem)
            continue
        if ceilings is None:
            ceilings = measure_ceilings(device, problem.dtype)
        passes = time_passes(function, like, convention, problem, random.Random(seed))
        bound = max(problem.num_bytes / ceilings.bandwidth, problem.flops / ceilings.matrix_rate)
        verdict.failure = passes.failure or impossible(problem, passes, bound)
        if verdict.failure is not None:
            yield verdict, None
            continue
        with torch.inference_mode():
            ours = None if problem.ours is None else min(call_times(problem.ours, device, NUM_RUNS))
        yield verdict, Timing(problem.name, problem.size, passes.seconds, ours, bound, passes.spread)


def time_passes(
    function: ChildFunction, like: Like, convention: Convention, problem: Problem, choose: random.Random
) -> Passes:
    """Times passes over several sets of inputs, which differ in one element each, are others in every pass,
    and have memory of their own. The results of random calls are checked."""
    device = check_device()
    num_bytes = bytes_of(*problem.tensors.values())
    num_sets = min(max(CACHE_BYTES[device.type] // num_bytes, FEWEST_SETS), MOST_SETS)
    checked = choose.sample(range(NUM_PASSES), NUM_CHECKED)
    times = []
    try:
        for i in range(NUM_PASSES):
            problems = [perturbed(problem, like, choose) for _ in range(num_sets)]
            sets = [convention.build(each) for each in problems]
            seconds, output = function.time(sets)
            times.append(seconds)
            if i in checked:
                k = choose.randrange(num_sets)
                results = results_of(convention, sets[k], output(k), [])
                check_form(problems[k], results, "a timed call")
                _check_timed(problems[k], results)
        nothing = statistics.median(function.time([])[0] for _ in range(NUM_PASSES))
    except Mismatch as mismatch:
        return Passes(math.nan, math.nan, sentence(mismatch))
    calls = [max(each - nothing, 1e-9) / num_sets for each in times[1:]]
    low, middle, high = statistics.quantiles(calls, n=4)
    return Passes(min(calls), (high - low) / middle, None, num_sets * num_bytes)


def impossible(problem: Problem, passes: Passes, bound: float) -> str | None:
    """What is wrong with a time below the bound, if no cache of a GPU can have the inputs: a CPU's ceilings
    are those of moments when other work ran. GEMMs of 8 bits are faster than the rate that was measured."""
    has_bytes = any(each.element_size() == 1 for each in problem.tensors.values())
    if problem.device.type != "cuda" or passes.num_bytes < BEYOND_CACHE or has_bytes:
        return None
    if passes.seconds * MEASURED >= bound:
        return None
    return f"impossible: a call takes {1e6 * passes.seconds:.3g} us, the device needs {1e6 * bound:.3g} us"


def _check_timed(problem: Problem, results: Results) -> None:
    try:
        check_values(problem, results, "a timed call")
    except Mismatch:
        floats = {name: each for name, each in problem.tensors.items() if each.is_floating_point()}
        ones = {name: torch.full_like(each, OVERWRITTEN) for name, each in floats.items()}
        if problem.kind != "draws" and holds(problem.with_tensors(**ones), results):
            raise Conduct(LATE) from None
        raise


def perturbed(problem: Problem, like: Like, choose: random.Random) -> Problem:
    """The problem with one other element."""
    if not like.sparse:
        return problem
    x = problem[like.sparse].clone()
    flat = x.view(-1) if x.is_contiguous() else x.flatten()
    value = choose.gauss(0.0, 1.0) if problem.kind != "draws" else DECIDED
    flat[choose.randrange(flat.numel())] = value if x.is_floating_point() else round(40 * value) % 100
    return problem.with_tensors(**{like.sparse: flat.view(x.shape)})


def _time_ranks(ranks: RankProcesses, convention: Convention, problem: Problem) -> Timing:
    """Beside torch.distributed's sum. The rate of the links is not measured, so there is no bound."""
    seconds = ranks.time(problem["x"], convention.library)
    theirs = ranks.time(problem["x"], "torch", "torch.distributed:all_reduce")
    return Timing(problem.name, problem.size, seconds, theirs, None)
