"""Checks kernels of libraries with many seeds: how often is there a false alarm? With a CUDA GPU:

python -m tests.kernel_check.library_runs --seeds 1000 --json FILE goes on where FILE ends.

`torch`: the functions of `right`; `diptych`: this project's kernels; `flashinfer`: where it is installed;
`vllm`: its CPU kernels, which need no GPU. A
kernel that raises for a type or size that it does not have refuses the case. Refused cases are counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.kernels.bias import check_bias
from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of
from diptych.shared.tools.conformance.kernels.one_call import check_form, check_values, sentence
from diptych.shared.tools.conformance.kernels.run import check_kernel, problems_of
from tests.kernel_check.cheat_runs import cases_of
from tests.kernel_check.right import RIGHT

CHUNK = 20
HEAD_DIMS = (64, 128, 256)
UNSUPPORTED = ("unsupported", "not support", "invalid configuration", "must be", "failed to dispatch",
               "% vec_elem_num", "expected scalar type", "primitive descriptor")  # fmt: skip
Alarms = tuple[int, int, list[str]]  # checks, refused, alarms


def flashinfer_functions() -> dict[str, Callable[..., Any]]:
    import flashinfer

    def workspace() -> torch.Tensor:
        return torch.zeros(128 * 2**20, dtype=torch.uint8, device=check_device())

    def decode(q: Any, kv: Any, indptr: Any, indices: Any, last: Any, *, sm_scale: float,
               window_left: int = -1) -> Any:  # fmt: skip
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, q.shape[1], kv[0].shape[2], _head_dim(q), kv[0].shape[1],
                     q_data_type=q.dtype, sm_scale=sm_scale, window_left=window_left)  # fmt: skip
        return wrapper.run(q, kv)

    def extend(q: Any, kv: Any, starts: Any, indptr: Any, indices: Any, last: Any, *, causal: bool,
               sm_scale: float, window_left: int = -1) -> Any:  # fmt: skip
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
        wrapper.plan(starts, indptr, indices, last, q.shape[1], kv[0].shape[2], _head_dim(q), kv[0].shape[1],
                     causal=causal, q_data_type=q.dtype, sm_scale=sm_scale,
                     window_left=window_left)  # fmt: skip
        return wrapper.run(q, kv)

    def latent(q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, indptr: Any, indices: Any, lens: Any, *,
               sm_scale: float) -> Any:  # fmt: skip
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace())
        starts = torch.arange(len(q_nope) + 1, dtype=torch.int32, device=q_nope.device)
        wrapper.plan(starts, indptr, indices, lens, q_nope.shape[1], q_nope.shape[2], q_pe.shape[2],
                     ckv.shape[1], False, sm_scale, q_nope.dtype, ckv.dtype)  # fmt: skip
        return wrapper.run(q_nope, q_pe, ckv, kpe)

    return {
        "attention.decode": decode,
        "attention.extend": extend,
        "mla.decode": latent,
        "rms_norm": flashinfer.rmsnorm,
        "add_rms_norm": flashinfer.fused_add_rmsnorm,
        "rope": flashinfer.apply_rope_with_cos_sin_cache_inplace,
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


def run_function(like: str, form: str, function: Callable[..., Any], seed: int) -> Alarms:
    torch.manual_seed(seed)
    convention, cases = convention_of(like, form), cases_of(like, 0)
    report = check_kernel(refusing(function), form, LIKES[like], convention, cases, seed=seed)
    alarms = [f"seed {seed}, {each.case}: {each.failure}" for each in report.failing]
    return len(report.verdicts), report.num_refused, alarms


def run_own(like: str, seed: int) -> Alarms:
    """The kernel that is timed beside a function, which has the inputs of its problem. That of `verify`
    accepts drafts that equal samples of the target: more seldom than the check asks."""
    convention, cases, refused, alarms = convention_of(like, "torch"), cases_of(like, 0), 0, []
    for case in cases:
        problem, _ = problems_of(LIKES[like], convention, case, seed)
        if problem.ours is None or like == "verify":
            refused += 1
            continue
        try:
            results = dict(convention.build(problem).results(problem.ours()))
            check_form(problem, results, case.name)
            check_values(problem, results, case.name)
            check_bias(problem, results)
        except Mismatch as mismatch:
            alarms.append(f"seed {seed}, {case.name}: {sentence(mismatch)}")
    return len(cases), refused, alarms


def runs_of(libraries: list[str]) -> dict[str, Callable[[int], Alarms]]:
    """ "library operation" -> the check of one seed."""
    runs: dict[str, Callable[[int], Alarms]] = {}
    plain = [like for like, library in RIGHT if library == "torch"]
    for like in plain:
        if "torch" in libraries:
            runs[f"torch {like}"] = lambda seed, a=like: run_function(a, "torch", RIGHT[a, "torch"], seed)  # type: ignore[misc]
        if "diptych" in libraries:
            runs[f"diptych {like}"] = lambda seed, a=like: run_own(a, seed)  # type: ignore[misc]
    if "flashinfer" in libraries:
        for like, function in flashinfer_functions().items():
            runs[f"flashinfer {like}"] = lambda seed, a=like, f=function: run_function(
                a, "flashinfer", f, seed
            )  # type: ignore[misc]
    if "vllm" in libraries:
        from tests.kernel_check.vllm_functions import refuse_truncated, vllm_functions

        for (like, form), function in vllm_functions().items():
            whole = refuse_truncated(function)
            runs[f"vllm {like}"] = lambda seed, a=like, b=form, f=whole: run_function(a, b, f, seed)  # type: ignore[misc]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--libraries", default="torch,diptych,flashinfer,vllm")
    parser.add_argument("--like", action="append")
    parser.add_argument("--json", type=Path, required=True, help="Written after every chunk of seeds.")
    arguments = parser.parse_args()
    libraries = arguments.libraries.split(",")
    for library in {"flashinfer", "vllm"} & set(libraries):
        if importlib.util.find_spec(library) is None:
            libraries.remove(library)
            print(f"{library} is not installed: its kernels are left out", flush=True)
    rows = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.is_file() else {}
    runs = {name: run for name, run in runs_of(libraries).items()
            if not arguments.like or name.partition(" ")[2] in arguments.like}  # fmt: skip
    for end in range(CHUNK, arguments.seeds + CHUNK, CHUNK):
        for name, run in runs.items():
            row = rows.setdefault(name, {"seeds": 0, "checks": 0, "refused": 0, "alarms": []})
            for seed in range(row["seeds"], min(end, arguments.seeds)):
                checks, refused, alarms = run(seed)
                row["seeds"], row["checks"] = seed + 1, row["checks"] + checks
                row["refused"], row["alarms"] = row["refused"] + refused, row["alarms"] + alarms
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in rows.items())
            arguments.json.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        print(f"{min(end, arguments.seeds)} seeds, {sum(len(row['alarms']) for row in rows.values())} alarms",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
