"""Grids of kernel tests, of which `make test` tries a diagonal (tests/fast_cut.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest


def fast_grid(**axes: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A parametrization by all combinations of the axes, each a mapping of ids to values."""

    def parametrized(test: Any) -> Any:
        for name, values in axes.items():
            test = pytest.mark.parametrize(name, list(values.values()), ids=list(values))(test)
        return test

    return parametrized
