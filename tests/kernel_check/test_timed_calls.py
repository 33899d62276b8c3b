"""Results of timed calls are computed before the clock stops, whatever the function does to its process."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.shared.tools.bench.bare_kernel import BEYOND_CACHE, LATE, Passes, impossible, time_passes
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of
from diptych.shared.tools.conformance.kernels.run import check_kernel
from tests.kernel_check.cheats import HONEST

SILU, TORCH = LIKES["silu_and_mul"], convention_of("silu_and_mul", "torch")


def failure_of_timing(target: str, like: str = "silu_and_mul") -> str | None:
    operation, convention = LIKES[like], convention_of(like, "torch")
    problem = operation.make(operation.timed("cpu")[0], convention.takes_scale, 0)
    with ChildFunction(target) as child:
        return time_passes(child, operation, convention, problem, random.Random(0)).failure


def test_results_that_are_computed_after_the_clock_are_named() -> None:
    assert failure_of_timing("tests.kernel_check.conduct:patches_its_watch") == LATE


def test_a_time_below_what_a_gpu_needs_is_impossible() -> None:
    def on(device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
        return SimpleNamespace(device=torch.device(device), tensors={"x": torch.empty(1, dtype=dtype)})

    fast, of_cache = (Passes(1e-6, 0.0, None, n) for n in (BEYOND_CACHE, BEYOND_CACHE - 1))
    failure = impossible(on("cuda"), fast, 2e-6)
    assert failure == "impossible: a call takes 1 us, the device needs 2 us"
    assert impossible(on("cuda"), fast, 1.2e-6) is None
    assert impossible(on("cuda"), of_cache, 2e-6) is None
    assert impossible(on("cpu"), fast, 2e-6) is None
    assert impossible(on("cuda", torch.int8), fast, 2e-6) is None


@pytest.mark.full
def test_a_function_that_changes_its_process_is_named() -> None:
    target = "tests.kernel_check.conduct:patches_its_process"
    with ChildFunction(target) as child:
        report = check_kernel(child, target, SILU, TORCH, SILU.cases[:1])
    assert report.status == 1
    assert report.names == ["the function replaces Child.do_pass"]


@pytest.mark.full
@pytest.mark.parametrize("like", HONEST)
def test_right_functions_may_be_timed(like: str) -> None:
    name = {"rms_norm": "rms_norm", "attention.decode": "paged_decode", "sampler": "sample", "gemm": "gemm"}
    module = "cheats" if like == "gemm" else "right"
    target = f"tests.kernel_check.{module}:{name[like]}"
    if like == "rms_norm":
        target = "docs.examples.my_kernels:rms_norm"
    assert failure_of_timing(target, like) is None
