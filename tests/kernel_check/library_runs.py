"""Checks kernels of libraries with many seeds: how often is there a false alarm? With a CUDA GPU:

python -m tests.kernel_check.library_runs --seeds 1000 --json FILE [--processes N] goes on where FILE ends.

`torch`: the functions of `right`; `diptych`: this project's kernels; `flashinfer`: where it is installed;
`vllm`: its kernels for the GPU, or for CPUs without one. A kernel that raises for a type or size that it
does not have refuses the case. Refused cases are counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.kernels.bias import check_bias
from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of
from diptych.shared.tools.conformance.kernels.one_call import (
    check_form,
    check_values,
    device_works,
    sentence,
)
from diptych.shared.tools.conformance.kernels.problem import Like
from diptych.shared.tools.conformance.kernels.run import SECONDS, Made, check_kernel, problems_of
from tests.kernel_check.cheat_runs import cases_of
from tests.kernel_check.honest_runs import made_once
from tests.kernel_check.many_seeds import Alarms, Task, run_seeds
from tests.kernel_check.right import RIGHT

HEAD_DIMS = (64, 128, 256)
WRONG_ROPE_DIMS = (80, 96)
"""See "A kernel of FlashInfer" in docs/server-bugs.md: an alarm in each seed."""
COMPILE_SECONDS = 900.0
"""Of a call. The first one of a function of FlashInfer compiles it."""
UNSUPPORTED = ("unsupported", "not support", "invalid configuration", "must be", "failed to dispatch",
               "% vec_elem_num", "expected scalar type", "primitive descriptor")  # fmt: skip


@cache
def wrapper_of(form: tuple[Any, ...], kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A wrapper of FlashInfer with its workspace for tensors of a form: a type and sizes. As in an engine, it
    is planned again for each call."""
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=check_device())
    return kind(workspace, *args, **kwargs)


def flashinfer_functions() -> dict[str, Callable[..., Any]]:
    import flashinfer

    def decode(q: Any, kv: Any, indptr: Any, indices: Any, last: Any, *, sm_scale: float,
               window_left: int = -1) -> Any:  # fmt: skip
        kind = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        wrapper = wrapper_of((q.dtype, q.shape[1:]), kind, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, q.shape[1], kv[0].shape[2], _head_dim(q), kv[0].shape[1],
                     q_data_type=q.dtype, sm_scale=sm_scale, window_left=window_left)  # fmt: skip
        return wrapper.run(q, kv)

    def extend(q: Any, kv: Any, starts: Any, indptr: Any, indices: Any, last: Any, *, causal: bool,
               sm_scale: float, window_left: int = -1) -> Any:  # fmt: skip
        kind = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        wrapper = wrapper_of((q.dtype, q.shape[1:]), kind, "NHD")
        wrapper.plan(starts, indptr, indices, last, q.shape[1], kv[0].shape[2], _head_dim(q), kv[0].shape[1],
                     causal=causal, q_data_type=q.dtype, sm_scale=sm_scale,
                     window_left=window_left)  # fmt: skip
        return wrapper.run(q, kv)

    def latent(q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, indptr: Any, indices: Any, lens: Any, *,
               sm_scale: float) -> Any:  # fmt: skip
        if q_nope.dtype == torch.float32:
            raise ValueError("unsupported: float32")
        form = q_nope.dtype, q_nope.shape[1:]
        wrapper = wrapper_of(form, flashinfer.mla.BatchMLAPagedAttentionWrapper)
        starts = torch.arange(len(q_nope) + 1, dtype=torch.int32, device=q_nope.device)
        wrapper.plan(starts, indptr, indices, lens, q_nope.shape[1], q_nope.shape[2], q_pe.shape[2],
                     ckv.shape[1], False, sm_scale, q_nope.dtype, ckv.dtype)  # fmt: skip
        return wrapper.run(q_nope, q_pe, ckv, kpe)

    def rope(positions: Any, q: Any, k: Any, head_dim: int, cache: Any, is_neox: bool) -> None:
        if head_dim in WRONG_ROPE_DIMS:
            raise ValueError(f"unsupported: heads of {head_dim} dims")
        flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, cache, is_neox)

    return {
        "attention.decode": decode,
        "attention.extend": extend,
        "mla.decode": latent,
        "rms_norm": flashinfer.rmsnorm,
        "add_rms_norm": flashinfer.fused_add_rmsnorm,
        "rope": rope,
        "silu_and_mul": flashinfer.silu_and_mul,
        "sampler": flashinfer.top_k_top_p_sampling_from_probs,
        "verify": flashinfer.chain_speculative_sampling,
    }


def _head_dim(q: torch.Tensor) -> int:
    if q.shape[-1] not in HEAD_DIMS or q.dtype == torch.float32:
        raise ValueError(f"unsupported: head_dim {q.shape[-1]}, {q.dtype}")
    return q.shape[-1]


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """An error of a library that names what it does not support is a refusal."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if any(each in str(error).lower() for each in UNSUPPORTED):
                raise ValueError(str(error)[:200]) from error
            raise

    return call


def run_function(operation: Like, form: str, function: Callable[..., Any], seed: int) -> Alarms:
    torch.manual_seed(seed)
    convention, cases = convention_of(operation.name, form), cases_of(operation.name, 0)
    seconds = COMPILE_SECONDS if form == "flashinfer" else SECONDS
    report = check_kernel(refusing(function), form, operation, convention, cases, seed=seed, seconds=seconds)
    alarms = [f"seed {seed}, {each.case}: {each.failure}" for each in report.failing]
    return len(report.verdicts), report.num_refused, alarms


def run_own(operation: Like, seed: int) -> Alarms:
    """The kernel that is timed beside a function, which has the inputs of its problem. That of `verify`
    accepts drafts that equal samples of the target: more seldom than the check asks."""
    convention, cases = convention_of(operation.name, "torch"), cases_of(operation.name, 0)
    refused, alarms = 0, []
    for case in cases:
        problem, _ = problems_of(operation, convention, case, seed)
        if problem.ours is None or operation.name == "verify":
            refused += 1
            continue
        try:
            made = Made(case.name, problem, "values", dict(convention.build(problem).results(problem.ours())))
            check_form(problem, made.results or {}, case.name)
            check_values(problem, made.on_cpu, case.name)
            check_bias(problem, made.on_cpu)
        except Mismatch as mismatch:
            alarms.append(f"seed {seed}, {case.name}: {sentence(mismatch)}")
        except Exception as error:  # of a kernel: it ends no other check
            alarms.append(f"seed {seed}, {case.name}: {type(error).__name__}: {error}")
    return len(cases), refused, alarms


@cache
def functions_of(library: str) -> dict[str, Callable[[Like, int], Alarms]]:
    """operation -> the check of one seed."""
    plain = [like for like, form in RIGHT if form == "torch"]
    if library == "diptych":
        return dict.fromkeys(plain, run_own)
    if library == "flashinfer":
        found = {(like, library): each for like, each in flashinfer_functions().items()}
    elif library == "vllm":
        from tests.kernel_check.vllm_functions import vllm_functions

        found = vllm_functions()
    else:
        found = {(like, "torch"): RIGHT[like, "torch"] for like in plain}

    def check(form: str, function: Callable[..., Any]) -> Callable[[Like, int], Alarms]:
        return lambda operation, seed: run_function(operation, form, function, seed)

    return {like: check(form, function) for (like, form), function in found.items()}


def run_seed(like: str, seed: int, names: list[str]) -> dict[str, Alarms]:
    """ "library operation" -> what is found. The libraries share inputs and expected results."""
    if torch.cuda.is_available():
        torch.set_num_threads(1)  # other processes have the other cores
    operation = replace(LIKES[like], make=made_once(LIKES[like].make))
    found = {each: functions_of(each.split()[0])[like](operation, seed) for each in names}
    if not device_works():
        raise RuntimeError(f"{', '.join(found)}, seed {seed}: the GPU fails after the check: {found}")
    return found


def tasks_of(libraries: list[str], likes: list[str] | None) -> dict[str, Task]:
    chosen = likes or [like for like, form in RIGHT if form == "torch"]
    names = {like: [f"{each} {like}" for each in libraries if like in functions_of(each)] for like in chosen}
    return {like: Task(each, partial(run_seed, like)) for like, each in names.items() if each}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--libraries", default="torch,diptych,flashinfer,vllm")
    parser.add_argument("--like", action="append")
    parser.add_argument("--json", type=Path, required=True, help="Written while seeds are run.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="No seed begins later.")
    arguments = parser.parse_args()
    libraries = arguments.libraries.split(",")
    for library in {"flashinfer", "vllm"} & set(libraries):
        if importlib.util.find_spec(library) is None:
            libraries.remove(library)
            print(f"{library} is not installed: its kernels are left out", flush=True)
    tasks = tasks_of(libraries, arguments.like)
    ends_at = time.monotonic() + arguments.seconds
    rows = run_seeds(tasks, arguments.seeds, arguments.json, arguments.processes, ends_at)
    for name, row in rows.items():
        counts = f"{row['seeds']} seeds, {row['checks']} cases, {row['refused']} refused"
        print(f"{name}: {counts}, {len(row['alarms'])} alarms", *row["alarms"][:2], sep="\n  ")


if __name__ == "__main__":
    main()
