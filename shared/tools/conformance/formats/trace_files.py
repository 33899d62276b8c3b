"""Reads the files of FlashInfer Trace: Definitions, Solutions and Workloads."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
)  # fmt: skip
OF_DUMP = {"unknown": "int32"}
"""What FlashInfer dumps for an input that the call did not have, most often indices -> the dtype."""
LANGUAGES = ("python", "triton")


@dataclass(frozen=True)
class Spec:
    """A tensor of a Definition. `shape`: names of axes; None: a scalar. `is_optional`: None may be passed."""

    shape: tuple[str, ...] | None
    dtype: torch.dtype
    is_optional: bool = False


@dataclass(frozen=True)
class Definition:
    """An operation. `axes`: name -> size; None: variable. `inputs`, `outputs`: in the order of the call.
    `reference`: source with the function `run`, or of another name. `is_dump`: of FlashInfer."""

    name: str
    op_type: str
    axes: Mapping[str, int | None]
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    reference: str
    run: str = "run"
    is_dump: bool = False

    @property
    def const(self) -> dict[str, int]:
        return {name: size for name, size in self.axes.items() if size is not None}

    @property
    def num_const_bytes(self) -> int:
        """Bytes of the inputs without a variable axis, which a case has in any size."""
        const, total = self.const, 0
        for spec in self.inputs.values():
            if spec.shape and set(spec.shape) <= set(const):
                total += math.prod(self.shape_of(spec, const)) * spec.dtype.itemsize
        return total

    def shape_of(self, spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in spec.shape or ())


@dataclass(frozen=True)
class Solution:
    """`sources`: path -> text. `is_dps`: outputs are arguments, after the inputs; None: not said."""

    name: str
    definition: str
    sources: Mapping[str, str]
    file: str
    function: str
    is_dps: bool | None = True


@dataclass(frozen=True)
class Workload:
    """`axes`: name -> size. `values`: input -> tensor or scalar; the others are random."""

    axes: Mapping[str, int]
    values: Mapping[str, Any] = field(default_factory=dict)
    uuid: str = ""


def read_definition(path: Path) -> Definition:
    """Raises `ValueError` that names what is wrong. A dump of FlashInfer, as FLASHINFER_TRACE_DUMP=1 writes
    them, is read too: its reference is the last function, and a result that an input is replaced with has the
    name of the input."""
    data = _read(path)
    try:
        is_dump = any(each.startswith("fi_api:") for each in data.get("tags") or ())
        axes = {name: _size(axis, is_dump) for name, axis in data["axes"].items()}
        inputs, outputs = ({name: _spec(path, name, each, is_dump) for name, each in data[kind].items()}
                           for kind in ("inputs", "outputs"))  # fmt: skip
        if is_dump:
            outputs = {f"{name}_out" if name in inputs else name: each for name, each in outputs.items()}
        op_type = data["op_type"] if "op_type" in data else data["type"]  # drafts of the format
        definition = Definition(
            data["name"], op_type, axes, inputs, outputs, data["reference"], is_dump=is_dump
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no Definition of FlashInfer Trace: {_said(error)} is missing or wrong"
        ) from None
    for name, spec in {**inputs, **outputs}.items():
        for axis in spec.shape or ():
            if axis not in axes:
                raise ValueError(f"{path}: {name} has the axis {axis!r}, which is not defined")
    if both := set(inputs) & set(outputs):
        raise ValueError(f"{path}: {', '.join(sorted(both))} is an input and an output")
    try:
        body = ast.parse(definition.reference).body
    except SyntaxError as error:
        raise ValueError(f"{path}: the reference is no Python: {error}") from None
    functions = [each.name for each in body if isinstance(each, ast.FunctionDef)]
    if "run" not in functions:
        if not functions or not is_dump:
            raise ValueError(f"{path}: the reference has no function run")
        definition = replace(definition, run=functions[-1])
    return definition


def _size(axis: Mapping[str, Any], is_dump: bool) -> int | None:
    """None: variable, as a constant axis of a dump whose size the call did not give."""
    if axis["type"] == "var" or (is_dump and "value" not in axis):
        return None
    return int(axis["value"])


def _spec(path: Path, name: str, data: Mapping[str, Any], is_dump: bool) -> Spec:
    dtype = OF_DUMP.get(data["dtype"], data["dtype"]) if is_dump else data["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"{path}: dtype of {name} is {dtype!r}; known are {', '.join(DTYPES)}")
    shape = data["shape"]
    is_optional = bool(data.get("optional", False))
    return Spec(tuple(shape) if shape else None, getattr(torch, dtype), is_optional)


def read_solution(path: Path) -> Solution:
    """Raises `ValueError` that names what is wrong."""
    data = _read(path)
    try:
        spec = data["spec"]
        language = str(spec["language"]).lower()
        file, _, function = spec["entry_point"].partition("::")
        sources = {each["path"]: each["content"] for each in data["sources"]}
        solution = Solution(
            data["name"],
            data["definition"],
            sources,
            file,
            function,
            spec.get("destination_passing_style"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no Solution of FlashInfer Trace: {_said(error)} is missing or wrong"
        ) from None
    if language not in LANGUAGES:
        raise ValueError(f"{path}: language {language} is not supported: only {', '.join(LANGUAGES)}")
    if file not in sources:
        raise ValueError(f"{path}: entry_point {spec['entry_point']!r} names no file of the sources")
    for each in sources:
        if Path(each).is_absolute() or ".." in Path(each).parts:
            raise ValueError(f"{path}: source {each!r} is outside of the folder of the solution")
    return solution


def read_workloads(path: Path, definition: Definition) -> list[Workload]:
    """The lines of a file for this Definition. Blobs are relative to the root of the data set, the folder
    above `workloads`."""
    folders = [each for each in path.resolve().parents if each.name == "workloads"]
    root = folders[0].parent if folders else path.resolve().parent
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            workload = data["workload"]
            if data["definition"] == definition.name:
                values = {name: value for name, each in workload["inputs"].items()
                          if (value := _value(root, each)) is not None}  # fmt: skip
                found.append(Workload(workload["axes"], values, workload.get("uuid", str(number))))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is no Workload: {error}") from None
    if not found:
        raise ValueError(f"{path} has no Workload of {definition.name}")
    return found


def _value(root: Path, data: Mapping[str, Any]) -> Any:
    """A tensor or scalar; None: random."""
    if data["type"] == "scalar":
        return data["value"]
    if data["type"] != "safetensors":
        return None
    from safetensors.torch import load_file

    return load_file(root / data["path"])[data["tensor_key"]]


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KeyError) else repr(error)


def solution_of_function(target: str, definition: Definition) -> Solution:
    """file.py:function as a Solution, with the files in UTF-8 beside it, but no folders. Whether outputs are
    arguments is read off its parameters."""
    path, _, function = target.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    sources = {}
    for each in file.parent.glob("*.py"):
        with suppress(UnicodeDecodeError):
            sources[each.name] = each.read_text(encoding="utf-8")
    if file.name not in sources:
        raise ValueError(f"{file} is no .py file in UTF-8")
    return Solution(target, definition.name, sources, file.name, function, None)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is no object")
    return data
