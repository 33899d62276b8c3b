"""The cover of a grid that the fast cut tries."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.kernels.fast_grid import fast_grid


def kept(**axes: dict[str, Any]) -> list[tuple[Any, ...]]:
    names, params = fast_grid(**axes).args
    assert names.split(",") == list(axes)
    assert len(params) == len(set(product(*(axis.values() for axis in axes.values()))))
    return [param.values for param in params if not param.marks]


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_every_value_of_two_axes(num: int) -> None:
    points = kept(a={str(i): i for i in range(num)}, b={str(i): -i for i in range(3)})
    assert len(points) == max(num, 3)
    assert {a for a, _ in points} == set(range(num))
    assert {b for _, b in points} == {0, -1, -2}


def test_every_pair_of_values_of_three_axes() -> None:
    points = kept(a={"x": 1, "y": 2}, b={str(i): i for i in range(4)}, check={str(i): i for i in range(5)})
    assert len(points) < 40
    for i, j, sizes in ((0, 1, 8), (0, 2, 10), (1, 2, 20)):
        assert len({(point[i], point[j]) for point in points}) == sizes
