"""The functions of a Definition and of Solutions: their files, and the inputs that they take."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.shared.tools.conformance.formats.trace_files import Definition, Solution

ADAPTER = """
from diptych.shared.tools.conformance.kernels.target import load_function

function, outputs = load_function({target!r}), {outputs!r}

def run(*args):
    returned = function(*args)
    if isinstance(returned, dict) and set(returned) == set(outputs):
        return tuple(returned[name] for name in outputs)
    return returned
"""
"""A function that returns its results by name: they come in the order of the Definition."""


def reference_of(definition: Definition) -> Solution:
    sources = {"reference.py": definition.reference}
    return Solution("reference", definition.name, sources, "reference.py", definition.run, False)


@contextmanager
def sources_of(definition: Definition, solution: Solution) -> Iterator[tuple[str, str]]:
    """The target and the folder of the files of a Solution, which are removed after the block."""
    with tempfile.TemporaryDirectory(prefix="diptych-solution-") as folder:
        for path, text in solution.sources.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        target = f"{Path(folder) / solution.file}:{solution.function}"
        adapter = Path(folder) / "diptych_call_of_solution.py"
        adapter.write_text(ADAPTER.format(target=target, outputs=tuple(definition.outputs)), encoding="utf-8")
        yield target if is_dps(definition, solution) else f"{adapter}:run", folder


def is_dps(definition: Definition, solution: Solution) -> bool:
    """Whether outputs are arguments. If the Solution does not say it: whether the function has parameters for
    them."""
    if solution.is_dps is not None:
        return solution.is_dps
    required = parameters_of(solution, has_optional=False)
    return required is None or len(required) > len(definition.inputs)


def check_style(definition: Definition, solution: Solution) -> None:
    """Raises `ValueError` for a function that is not there, or takes the inputs only, where outputs are
    arguments too."""
    if not re.search(rf"\b{re.escape(solution.function)}\b|\bimport *\*", solution.sources[solution.file]):
        raise ValueError(f"{solution.name}: {solution.file} has no function {solution.function!r}")
    names = parameters_of(solution)
    if solution.is_dps and names is not None and len(names) == len(definition.inputs):
        raise ValueError(
            f"{solution.name}: {solution.function} takes {len(names)} arguments, as many as inputs, "
            "but destination_passing_style is true: outputs are arguments too. Write false for a function "
            "that returns its results"
        )


def inputs_of(definition: Definition, solution: Solution) -> tuple[str, ...]:
    """The inputs in the order of the arguments: by name, if the function has the Definition's names, in any
    order and perhaps not all; otherwise in the order of the Definition."""
    names = parameters_of(solution)
    if names is None or not set(names) <= {*definition.inputs, *definition.outputs}:
        return tuple(definition.inputs)
    return tuple(name for name in names if name in definition.inputs)


def parameters_of(solution: Solution, has_optional: bool = True) -> list[str] | None:
    """The names of the function's positional parameters, also of those with a default if `has_optional`;
    None: not known, or any number."""
    try:
        body = ast.parse(solution.sources[solution.file]).body
    except SyntaxError:
        return None
    for each in body:
        if isinstance(each, ast.FunctionDef) and each.name == solution.function and not each.args.vararg:
            names = [arg.arg for arg in (*each.args.posonlyargs, *each.args.args)]
            return names if has_optional else names[: len(names) - len(each.args.defaults)]
    return None
