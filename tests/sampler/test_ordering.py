import math

import pytest
import torch

from shared.sampling.ordering import sort_descending

VALUES = [
    [1.0, 3.0, 3.0, -2.0, 0.0, -0.0, 3.0, -math.inf],
    [0.0, -0.0, 0.0, -0.0, math.inf, -1e-45, 1e-45, -3e38],
    [-5.0] * 8,
]


@pytest.mark.parametrize("num", [None, 1, 3, 8, 20])
def test_ties_come_lowest_index_first(num: int | None) -> None:
    values = torch.tensor(VALUES)
    ordered, indices = sort_descending(values, num)
    for row, row_values, row_indices in zip(values.tolist(), ordered.tolist(), indices.tolist()):
        expected = sorted(range(8), key=lambda i: (-row[i], i))[:num]
        assert row_indices == expected
        assert row_values == [row[i] for i in expected]


@pytest.mark.parametrize("num", [None, 50, 400])
def test_agrees_with_a_stable_sort(num: int | None) -> None:
    values = torch.randint(-40, 40, (5, 1000)).float() / 8  # many ties
    ordered, indices = sort_descending(values, num)
    expected = torch.sort(values, dim=-1, descending=True, stable=True)
    assert torch.equal(ordered, expected.values[:, :num])
    assert torch.equal(indices, expected.indices[:, :num])
