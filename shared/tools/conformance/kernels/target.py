"""Loads the function that a target names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diptych.shared import registry


def check_named(target: str) -> None:
    """Raises `ValueError` for a target without a function's name, and for a file that is not there. Nothing
    of the target runs."""
    if ":" not in target:
        raise ValueError(f"{target!r} names no function: write file.py:function or package.module:function")
    file = Path(target.rpartition(":")[0])
    if file.suffix == ".py" and not file.is_file():
        raise ValueError(f"no such file: {file}")
    if file.suffix != ".py" and file.is_file():
        raise ValueError(f"{file} is not a .py file")


def load_function(target: str) -> Callable[..., Any]:
    """Load package.module:function or file.py:function, which may import modules beside the file. Raises
    `ValueError` if there is none."""
    check_named(target)
    file = Path(target.rpartition(":")[0])
    if file.suffix == ".py" and str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        function: Callable[..., Any] = registry.load("function", target)
    except ValueError as error:
        raise ValueError(f"{error}{_advice(error.__cause__)}") from error
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"{type(function).__name__} {function!r:.60}"
        raise ValueError(f"{target} is {kind}, not a function")
    return function


def _advice(cause: BaseException | None) -> str:
    """What helps when a file cannot be imported."""
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        name = cause.name.partition(".")[0]
        return f". Install it beside diptych, in {sys.prefix}; with uvx: --with {name}"
    if isinstance(cause, ImportError) and "relative import" in str(cause):
        return ". A module of a package is named package.module:function"
    return ""
