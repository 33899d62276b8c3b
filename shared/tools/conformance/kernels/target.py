"""Loads the function that a target names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.shared import registry


def load_function(target: str) -> Callable[..., Any]:
    """Load package.module:function or file.py:function. Raises `ValueError` if there is none."""
    if ":" not in target:
        raise ValueError(f"{target!r} names no function: write file.py:function or package.module:function")
    function: Callable[..., Any] = registry.load("the kernel", target)
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"{type(function).__name__} {function!r:.60}"
        raise ValueError(f"{target} is {kind}, not a function")
    return function
