"""Checks kernels of libraries with many seeds: how often is there a false alarm? With a CUDA GPU:

python -m tests.kernel_check.library_runs --seeds 1000 --json FILE [--processes N] goes on where FILE ends.

`torch`: the functions of `right`; `diptych`: this project's kernels; `flashinfer`: where it is installed;
`vllm`: its kernels for the GPU, or for CPUs without one. A kernel that raises for a type or size that it
does not have refuses the case. Refused cases are counted.

The calls, the cases and the limits are those of `check kernel`. Inputs, expected results and comparisons are
on the CPU, where they are cheaper than with the waits of a GPU, and libraries share them; only the functions
run on the GPU. Under NVIDIA's MPS (`nvidia-cuda-mps-control -d`) processes do not take turns there.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of
from diptych.shared.tools.conformance.kernels.one_call import History, limited
from diptych.shared.tools.conformance.kernels.problem import Like, Problem
from diptych.shared.tools.conformance.kernels.run import SECONDS, check_problem, problems_of
from tests.kernel_check.called_on_gpu import FunctionOnGPU, checking_on_cpu, gpu_works
from tests.kernel_check.cheat_runs import cases_of
from tests.kernel_check.many_seeds import Alarms, Ends, Record, Task, run_seeds
from tests.kernel_check.right import RIGHT

HEAD_DIMS = (64, 128, 256)
WRONG_ROPE_DIMS = (80, 96)
"""See "A kernel of FlashInfer" in docs/server-bugs.md: an alarm in each seed."""
COMPILE_SECONDS = 900.0
"""Of a call. The first one of a function of FlashInfer compiles it."""
MOST_RESTARTS = 6
"""Of the processes, when one has ended."""
UNSUPPORTED = ("unsupported", "not support", "invalid configuration", "must be", "failed to dispatch",
               "% vec_elem_num", "expected scalar type", "primitive descriptor")  # fmt: skip


@cache
def wrapper_of(form: tuple[Any, ...], kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A wrapper of FlashInfer with its workspace for tensors of a form: a type and sizes. As in an engine, it
    is planned again for each call."""
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda")
    return kind(workspace, *args, **kwargs)


def flashinfer_functions() -> dict[str, Callable[..., Any]]:
    import flashinfer

    def decode(q: Any, kv: Any, indptr: Any, indices: Any, last: Any, *, sm_scale: float,
               window_left: int = -1) -> Any:  # fmt: skip
        kind, head_dim = flashinfer.BatchDecodeWithPagedKVCacheWrapper, _head_dim(q)
        wrapper = wrapper_of((q.dtype, q.shape[1:]), kind, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, q.shape[1], kv[0].shape[2], head_dim, kv[0].shape[1],
                     q_data_type=q.dtype, sm_scale=sm_scale, window_left=window_left)  # fmt: skip
        return wrapper.run(q, kv)

    def extend(q: Any, kv: Any, starts: Any, indptr: Any, indices: Any, last: Any, *, causal: bool,
               sm_scale: float, window_left: int = -1) -> Any:  # fmt: skip
        kind, head_dim = flashinfer.BatchPrefillWithPagedKVCacheWrapper, _head_dim(q)
        wrapper = wrapper_of((q.dtype, q.shape[1:]), kind, "NHD")
        wrapper.plan(starts, indptr, indices, last, q.shape[1], kv[0].shape[2], head_dim, kv[0].shape[1],
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


Functions = dict[str, tuple[str, Callable[..., Any]]]
"""Operation -> the convention and the function."""


class Run:
    """One library in one seed of one operation."""

    def __init__(self, operation: Like, form: str, function: Callable[..., Any], seed: int) -> None:
        self.operation, self.convention, self.seed = operation, convention_of(operation.name, form), seed
        seconds = COMPILE_SECONDS if form == "flashinfer" else SECONDS
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.function = FunctionOnGPU(limited(refusing(function), seconds), device)
        self.history = History()
        self.checked, self.refused, self.alarms = 0, 0, list[str]()

    def check(self, case: Any, problem: Problem, other: Problem | None) -> None:
        """The names of mistakes are not looked for."""
        self.checked += 1
        try:
            verdict = check_problem(
                self.function, self.operation, self.convention, problem, other, self.history
            )
        except Exception as error:  # of a kernel: it ends no other check
            self.alarms.append(f"seed {self.seed}, {case.name}: {type(error).__name__}: {error}")
            return
        self.refused += verdict.refusal is not None
        if verdict.failure is not None:
            self.alarms.append(f"seed {self.seed}, {case.name}: {verdict.failure}")


def run_function(operation: Like, form: str, function: Callable[..., Any], seed: int) -> Alarms:
    (found,) = run_functions(operation, {"": (form, function)}, seed).values()
    return found


def run_functions(operation: Like, functions: Functions, seed: int, cases: Any = None) -> dict[str, Alarms]:
    """The functions share the inputs and the expected results of a case."""
    torch.manual_seed(seed)
    runs = {name: Run(operation, *each, seed) for name, each in functions.items()}
    with checking_on_cpu():
        for case in cases_of(operation.name, 0) if cases is None else cases:
            made: dict[bool, tuple[Problem, Problem | None]] = {}
            for name, run in runs.items():
                takes_scale = run.convention.takes_scale or getattr(case, "scale", 1.0) == 1.0
                if takes_scale not in made:
                    made[takes_scale] = problems_of(operation, run.convention, case, seed)
                run.check(case, *made[takes_scale])
                if run.alarms and not gpu_works():
                    raise Ends(name, [*run.alarms, "every call on the GPU fails since"])
    return {name: (run.checked, run.refused, run.alarms) for name, run in runs.items()}


@cache
def functions_of(library: str) -> Functions:
    if library == "flashinfer":
        found = {(like, library): each for like, each in flashinfer_functions().items()}
    elif library == "vllm":
        from tests.kernel_check.vllm_functions import vllm_functions

        found = vllm_functions()
    elif library == "diptych":
        from tests.kernel_check.own_functions import OWN as found
    else:
        found = {(like, form): each for (like, form), each in RIGHT.items() if form == "torch"}
    return {like: (form, function) for (like, form), function in found.items()}


def run_seed(like: str, seed: int, names: list[str], case: int | None = None) -> dict[str, Alarms]:
    """ "library operation" -> what is found, in all cases or in one."""
    if torch.cuda.is_available():
        torch.set_num_threads(1)  # other processes have the other cores
    functions = {each: functions_of(each.split()[0])[like] for each in names}
    cases = None if case is None else cases_of(like, 0)[case : case + 1]
    return run_functions(LIKES[like], functions, seed, cases)


def tasks_of(libraries: list[str], likes: list[str] | None, without: set[str]) -> dict[str, Task]:
    """The libraries run together in each seed, except torch, which comes last."""
    tasks = {}
    for rank, group in enumerate(([each for each in libraries if each != "torch"], ["torch"])):
        for like in likes or [like for like, form in RIGHT if form == "torch"]:
            names = [f"{each} {like}" for each in group if each in libraries and like in functions_of(each)]
            if names := [each for each in names if each not in without]:
                num_cases = len(cases_of(like, 0)) if rank == 0 else 0
                tasks[f"{like} {rank}"] = Task(names, partial(run_seed, like), num_cases, rank)
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--libraries", default="torch,diptych,flashinfer,vllm")
    parser.add_argument("--like", action="append")
    parser.add_argument("--json", type=Path, required=True, help="Written while seeds are run.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="No seed begins later.")
    parser.add_argument("--stop", type=Path, help="No seed begins when this file is there.")
    arguments = parser.parse_args()
    libraries = arguments.libraries.split(",")
    for library in {"flashinfer", "vllm"} & set(libraries):
        if importlib.util.find_spec(library) is None:
            libraries.remove(library)
            print(f"{library} is not installed: its kernels are left out", flush=True)
    ends_at, stop = time.monotonic() + arguments.seconds, arguments.stop

    def goes_on() -> bool:
        return time.monotonic() <= ends_at and not (stop and stop.exists())

    ended = set[str]()
    for _ in range(MOST_RESTARTS):
        tasks = tasks_of(libraries, arguments.like, ended)
        try:
            run_seeds(tasks, arguments.seeds, arguments.json, arguments.processes, goes_on)
            break
        except Ends as end:
            ended.add(end.name)
            print(f"{end.name} ended its process", flush=True)
        except BrokenExecutor as error:
            print(f"a process ended: {error}", flush=True)
    for name, row in Record(arguments.json).rows.items():
        counts = f"{row['seeds']} seeds, {row['checks']} cases, {row['refused']} refused"
        print(f"{name}: {counts}, {len(row['alarms'])} alarms", *row["alarms"][:2], sep="\n  ")


if __name__ == "__main__":
    main()
