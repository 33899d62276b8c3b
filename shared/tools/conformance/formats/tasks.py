"""Tasks of KernelBench (a file with Model, get_inputs, get_init_inputs) and of GPU MODE (a folder
with task.yml and reference.py). The task's own reference, in float64, gives what is expected."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.compare import error_rms
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from diptych.shared.tools.conformance.kernels.one_call import ROW_FACTOR
from diptych.shared.tools.conformance.kernels.patterns import NATIVE
from diptych.shared.tools.conformance.kernels.problem import Call, Convention, Like, Problem, bytes_of

NATIVE_FACTOR = 1.05
"""The error may be so many times that of the reference in bfloat16."""
PEAK = 10.0
"""The error of an element may be so many times the norm's, relative to the root mean square of results, or
that of the reference in bfloat16."""
NUM_SEEDS = 5
EXACT_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Task:
    """`target`, `folder`: of the process of the submission."""

    like: Like
    convention: Convention
    target: str
    folder: str


def read_task(path: Path, submission: str) -> Task:
    """`submission`: file.py or file.py:NAME. Raises `ValueError` that names what is missing."""
    is_folder = path.is_dir()
    file, _, name = submission.partition(":")
    name = name or ("custom_kernel" if is_folder else "ModelNew")
    if not Path(file).is_file():
        raise ValueError(f"{submission}: no such file")
    target = f"{Path(file).resolve()}:{name}"
    make = _gpu_mode if is_folder else _kernel_bench
    return make(path.resolve(), target)


def _kernel_bench(path: Path, target: str) -> Task:
    module = _loaded(path, ("Model", "get_inputs", "get_init_inputs"))
    init_inputs = tuple(module.get_init_inputs())
    cases = tuple(Case(f"inputs {i}", number=i) for i in range(NUM_SEEDS))

    def run(weights_seed: int, dtype: torch.dtype, *inputs: Any) -> Any:
        torch.manual_seed(weights_seed)
        return module.Model(*init_inputs).eval().to(dtype).to(check_device())(*inputs)

    def make(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
        torch.manual_seed(seed + case.number)
        return _problem(case.name, module.get_inputs(), partial(run, seed), {"weights_seed": seed})

    def build(problem: Problem) -> Call:
        seed = problem.constants["weights_seed"]
        return Call((target, seed, init_inputs, *_inputs(problem)), results=_results)

    convention = Convention("kernelbench", "ModelNew(*get_init_inputs())(*get_inputs())", "as Model", build)
    like = Like(
        path.stem, "Model of a task of KernelBench.", "elements", cases, lambda _: cases[:1], make, {}
    )
    return Task(like, convention, f"{CALLS}:model_new", str(path.parent))


def _gpu_mode(path: Path, target: str) -> Task:
    file = path / "task.yml"
    data = _yaml().safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    if not isinstance(data, dict) or not data.get("tests"):
        raise ValueError(f"{path} has no task.yml with tests")
    module = _loaded(path / "reference.py", ("generate_input", "ref_kernel"))
    tests, timed = (
        tuple(Case(", ".join(f"{name} {value}" for name, value in spec.items()), spec=spec) for spec in specs)
        for specs in (data["tests"], data.get("benchmarks") or data["tests"][-1:])
    )

    def make(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
        spec = dict(case.spec)
        if "seed" in spec:  # public: mixed with ours
            spec["seed"] = (int(spec["seed"]) + seed) % 2**31
        torch.manual_seed(seed)
        given = module.generate_input(**spec)
        inputs = list(given) if isinstance(given, (tuple, list)) else [given]
        is_single = not isinstance(given, (tuple, list))

        def run(dtype: torch.dtype, *values: Any) -> Any:
            return module.ref_kernel(values[0] if is_single else tuple(values))

        return _problem(case.name, inputs, run, {"is_single": is_single})

    def build(problem: Problem) -> Call:
        return Call((target, problem.constants["is_single"], *_inputs(problem)), results=_results)

    convention = Convention("gpu-mode", "custom_kernel(data) -> out", "as generate_input", build)
    what = "Task of GPU MODE."
    like = Like(path.name, what, "elements", tests, lambda _: timed, make, {})
    return Task(like, convention, f"{CALLS}:custom_kernel", str(path))


CALLS = "diptych.shared.tools.conformance.formats.task_calls"


def _problem(name: str, inputs: list[Any], run: Callable[..., Any], constants: Mapping[str, Any]) -> Problem:
    """`run(dtype, *inputs)`: the task's reference in this type."""
    values = [each.to(check_device()) if isinstance(each, torch.Tensor) else each for each in inputs]
    tensors = {f"input {i}": each for i, each in enumerate(values) if isinstance(each, torch.Tensor)}
    others = {f"input {i}": each for i, each in enumerate(values) if not isinstance(each, torch.Tensor)}
    main = next((x.dtype for x in tensors.values() if x.is_floating_point()), torch.float32)
    native = _flat(run(main, *copies(values, None)))
    dtypes = {key: each.dtype for key, each in native.items()}

    def truth(problem: Problem) -> dict[str, torch.Tensor]:
        exact = _flat(run(torch.float64, *copies(_inputs(problem), torch.float64)))
        return {key: each.cpu().double() for key, each in exact.items()}

    @cache
    def half() -> dict[str, torch.Tensor]:
        return _flat(run(torch.bfloat16, *copies(values, torch.bfloat16)))

    def limit(expected: Mapping[str, torch.Tensor]) -> Tolerance:
        """The limit of a result by itself; of several, the largest one, which is only reported."""
        each = [
            _limit_of(half()[key], exact) for key, exact in expected.items() if dtypes[key] not in EXACT_TYPES
        ]
        return max(
            each, key=lambda limit: limit.rms, default=Tolerance(0.0, 0.0, 0.0, "results are integers")
        )

    constants = {**constants, "others": others, "num_inputs": len(values), NATIVE: lambda _: half()}
    num_bytes = bytes_of(*tensors.values(), *native.values())
    return Problem(
        name, tensors, constants, truth, "task", main, sum(each.numel() for each in tensors.values()),
        float(num_bytes), 0.0, limit=limit, limits_each=True, dtypes=dtypes,
    )  # fmt: skip


def _limit_of(half: torch.Tensor, exact: torch.Tensor) -> Tolerance:
    """The reference in bfloat16 holds itself: none of its elements and rows is beyond the limit. Raises
    `ValueError` if its error is no number."""
    error = (half.detach().cpu().double() - exact).abs()
    rms, largest = NATIVE_FACTOR * error_rms(half, exact), NATIVE_FACTOR * float(error.max())
    if not math.isfinite(rms + largest):
        raise ValueError(
            "the task's reference in bfloat16 gives NaN or infinity: there is no error to compare with"
        )
    row = 0.0  # vectors have no rows
    if exact.dim() > 1:
        errors, norms = (x.flatten(0, -2).norm(dim=-1) for x in (error, exact))
        row = NATIVE_FACTOR * float((errors / norms)[norms > 0].max()) if bool((norms > 0).any()) else 0.0
    size = float(exact.square().mean().sqrt())
    reason = f"{NATIVE_FACTOR} times the error of the reference in bfloat16"
    return Tolerance(max(PEAK * rms * size, largest), 0.0, rms, reason, row=max(ROW_FACTOR * rms, row))


def copies(values: list[Any], dtype: torch.dtype | None) -> list[Any]:
    """The reference may write to its inputs. `dtype`: of numbers that are not integers."""
    return [
        (each.clone() if dtype is None or not each.is_floating_point() else each.to(dtype))
        if isinstance(each, torch.Tensor) else each
        for each in values
    ]  # fmt: skip


def _inputs(problem: Problem) -> list[Any]:
    names = [f"input {i}" for i in range(problem.constants["num_inputs"])]
    others = problem.constants["others"]
    return [problem.tensors[name] if name in problem.tensors else others[name] for name in names]


def _flat(value: Any) -> dict[str, torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {f"output {i}": each.detach() for i, each in enumerate(values)}


def _results(value: Any) -> dict[str, torch.Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return {f"output {i}": each for i, each in enumerate(values)}


def _loaded(path: Path, names: tuple[str, ...]) -> ModuleType:
    """The module of a task, which finds the files beside it."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _beside(path.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    for name in names:
        if not hasattr(module, name):
            raise ValueError(f"{path} has no {name}")
    return module


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("task.yml needs the package pyyaml: pip install pyyaml") from None
    return yaml
