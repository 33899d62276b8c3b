"""Writes a data set of FlashInfer Trace: Definitions, Workloads with NaN in memory that is not live,
Solutions, and Traces, which are verdicts of this checker."""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.formats.trace_check import convention_of, device_text, read_off
from diptych.shared.tools.conformance.formats.trace_files import (
    Definition,
    Solution,
    read_definition,
    read_solution,
)
from diptych.shared.tools.conformance.formats.trace_functions import reference_of, sources_of
from diptych.shared.tools.conformance.formats.trace_op import TraceOp
from diptych.shared.tools.conformance.formats.trace_ops import op_of
from diptych.shared.tools.conformance.formats.trace_own import KERNELS, OWN
from diptych.shared.tools.conformance.formats.trace_references import DEFINITIONS, OUTPUT_ALONE
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.functions import Raised
from diptych.shared.tools.conformance.kernels.one_call import call
from diptych.shared.tools.conformance.kernels.problem import Problem
from diptych.shared.tools.conformance.kernels.run import check_problem

AUTHOR = "diptych"
NUM_CALLS = 8


def export(folder: Path, chosen: list[str], seed: int, has_traces: bool = True) -> Iterator[str]:
    """Writes the data set; a line for each Definition. `chosen`: types of operations; empty: all."""
    types = chosen or dict.fromkeys(each["op_type"] for each in DEFINITIONS.values())
    kernels = {OUTPUT_ALONE[key]["name"]: source for key, source in KERNELS.items()}
    known = [*DEFINITIONS.values(), *OUTPUT_ALONE.values()]
    for op_type, data in [(each["op_type"], each) for op in types for each in known if each["op_type"] == op]:
        _write(folder / "definitions" / op_type / f"{data['name']}.json", data)
        definition = read_definition(folder / "definitions" / op_type / f"{data['name']}.json")
        solutions = [_solution(folder, definition, definition.reference, "baseline")]
        if op_type in OWN:
            solutions.append(_solution(folder, definition, OWN[op_type], AUTHOR))
        if definition.name in kernels:
            own = _solution(folder, definition, kernels[definition.name], AUTHOR, ["cuda"])
            solutions += [own] if registry.runs_triton(check_device().type) else []
        reference = reference_of(definition)
        with (
            sources_of(definition, reference) as (target, place),
            ChildFunction(target, folder=place) as judge,
        ):
            op = op_of(definition, read_off(definition, judge))
            assert op is not None
            problems = [op.like.make(case, True, seed) for case in op.like.cases]
            workloads = [_workload(folder, definition, op, problem) for problem in problems]
            lines: list[dict[str, Any]] = [
                {"definition": definition.name, "workload": each} for each in workloads
            ]
            _write_lines(folder / "workloads" / op_type / f"{definition.name}.jsonl", lines)
            num_passed = 0
            for author, solution in solutions if has_traces else ():
                found = _evaluations(judge, definition, solution, op, problems)
                traces = [
                    {**line, "solution": solution.name, "evaluation": each}
                    for line, each in zip(lines, found)
                ]
                num_passed += sum(each["evaluation"]["status"] == "PASSED" for each in traces)
                _write_lines(folder / "traces" / author / op_type / f"{definition.name}.jsonl", traces)
        yield f"{op_type}: {definition.name}, {len(workloads)} workloads, {num_passed} traces passed"


def _solution(
    folder: Path, definition: Definition, source: str, author: str, hardware: Sequence[str] = ("cpu", "cuda")
) -> tuple[str, Solution]:
    name = f"{author}_{definition.name}"
    path = folder / "solutions" / author / definition.op_type / definition.name / f"{name}.json"
    _write(path, {
        "name": name, "definition": definition.name, "author": author,
        "sources": [{"path": "main.py", "content": source}],
        "spec": {"language": "python", "target_hardware": list(hardware), "entry_point": "main.py::run",
                 "dependencies": ["torch"] + ["diptych"] * (author == AUTHOR),
                 "destination_passing_style": False},
    })  # fmt: skip
    return author, read_solution(path)


def _workload(folder: Path, definition: Definition, op: TraceOp, problem: Problem) -> dict[str, Any]:
    """Tensors go to one blob; their memory that is not live holds NaN."""
    from safetensors.torch import save_file

    name = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{definition.name}/{problem.name}"))
    path = Path("blob") / "workloads" / definition.op_type / definition.name / f"{name}.safetensors"
    tensors, inputs, sizes = {}, {}, definition.const
    for key, spec in definition.inputs.items():
        value = op.inputs[key](problem)
        if not isinstance(value, torch.Tensor):
            inputs[key] = {"type": "scalar", "value": value}
            continue
        tensors[key] = value.cpu().contiguous()
        inputs[key] = {"type": "safetensors", "path": path.as_posix(), "tensor_key": key}
        sizes.update(zip(spec.shape or (), value.shape))
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / path)
    axes = {each: sizes[each] for each, size in definition.axes.items() if size is None}
    return {"axes": axes, "inputs": inputs, "uuid": name}


def _evaluations(
    judge: ChildFunction, definition: Definition, solution: Solution, op: TraceOp, problems: list[Problem]
) -> Iterator[dict[str, Any]]:
    with (
        sources_of(definition, solution) as (target, folder),
        ChildFunction(target, folder=folder) as function,
    ):
        convention = convention_of(definition, solution, op)
        ours = convention_of(definition, reference_of(definition), op)
        for problem in problems:
            verdict = check_problem(function, op.like, convention, problem)
            evaluation: dict[str, Any] = {
                "status": "PASSED", "log": verdict.words, "timestamp": datetime.now(timezone.utc).isoformat(),
                "environment": {"hardware": device_text(), "libs": _versions()},
            }  # fmt: skip
            if verdict.failure is not None or verdict.refusal is not None:
                is_raised = verdict.refusal is not None or "raised" in str(verdict.failure)
                evaluation["status"] = "RUNTIME_ERROR" if is_raised else "INCORRECT_NUMERICAL"
            try:
                if evaluation["status"] != "RUNTIME_ERROR":
                    evaluation["correctness"] = _correctness(
                        call(function, convention, problem), problem, verdict
                    )
            except (Mismatch, Raised, ValueError):
                evaluation["status"] = "RUNTIME_ERROR"
            if evaluation["status"] == "PASSED":
                mine, theirs = (
                    min(each.time([way.build(problem)] * NUM_CALLS)[0] for _ in range(3)) * 1e3 / NUM_CALLS
                    for each, way in ((function, convention), (judge, ours))
                )
                evaluation["performance"] = {
                    "latency_ms": mine, "reference_latency_ms": theirs, "speedup_factor": theirs / mine,
                }  # fmt: skip
            yield evaluation


def _correctness(results: dict[str, torch.Tensor], problem: Problem, verdict: Any) -> dict[str, Any]:
    """Errors against float64; `extra` has the observations of the checker."""
    largest = relative = 0.0
    for name, truth in problem.expected.items():
        error = (results[name].cpu().double() - truth).abs().nan_to_num(0.0)
        largest = max(largest, float(error.max()))
        relative = max(relative, float((error / truth.abs().clamp(min=1e-6)).nan_to_num(0.0).max()))
    extra = {"checker": "diptych", "error_norm": verdict.error, "allowed_error_norm": verdict.allowed}
    return {
        "max_relative_error": relative,
        "max_absolute_error": largest,
        "extra": {**extra, **verdict.reports},
    }


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if check_device().type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return versions


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
