"""Grids of kernel tests: `make test` tries a cover of them, `make test-all` all combinations."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from diptych.shared.tools.conformance.clauses.case import Case
from tests.conformance.fast_cut import pairwise_cover


def fast_grid(**axes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """A parametrization by all combinations of the axes, each a mapping of ids to values. Those beyond a
    cover are marked `full`. In the cover each value of two axes occurs, and each pair of values of more."""
    points = {"-".join(point): dict(zip(axes, point)) for point in product(*axes.values())}
    if len(axes) == 2:  # the diagonal, again and again over the shorter axis
        first, second = (list(axis) for axis in axes.values())
        num = max(len(first), len(second))
        cover = {f"{first[i % len(first)]}-{second[i % len(second)]}" for i in range(num)}
    else:
        # Prefixed: a field `check` would hide the method of that name.
        cases = [Case(name, **{f"axis_{a}": v for a, v in point.items()}) for name, point in points.items()]
        cover = pairwise_cover(tuple(cases), most=len(cases))
    params = [
        pytest.param(
            *(axes[axis][value] for axis, value in point.items()),
            id=name,
            marks=() if name in cover else pytest.mark.full,
        )
        for name, point in points.items()
    ]
    return pytest.mark.parametrize(",".join(axes), params)
