"""Comparing rows of tensors: what counts as an error, and how much of it is allowed."""

from __future__ import annotations

import math

import pytest
import torch

from diptych.shared.tools.conformance.clauses.closeness import (
    GROWTH,
    INSIDE,
    PEAK,
    ROWS,
    allowed_between,
    compare_rows,
    error_ratio,
)
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, TABLE, Tolerance

LOOSE = Tolerance(0.1, 0.1, 0.1, "for these tests")


def test_equal_rows_have_no_error() -> None:
    x = torch.tensor([[1.0, math.inf, math.nan], [0.0, -math.inf, 2.0]])
    ratios, found = compare_rows(x, x.clone(), EXACT)
    assert ratios.tolist() == [0.0, 0.0]
    assert found is None


def test_the_first_bad_row_and_its_worst_element() -> None:
    a = torch.ones(3, 2, 4)
    b = a.clone()
    b[0, 0, 0] += 0.05  # allowed
    b[1, 1, 2] += 0.5
    b[1, 0, 3] += 0.3
    b[2] += 9.0
    ratios, found = compare_rows(a, b, LOOSE)
    assert (found.row, found.index, found.num_beyond, found.num_elements) == (1, (1, 2), 2, 8)
    assert (found.a, found.b) == (1.0, 1.5)
    assert found.allowed == pytest.approx(0.1 + 0.1)
    assert ratios.tolist() == pytest.approx([0.05 / 8**0.5, (0.34 / 8) ** 0.5, 9.0])
    assert found.ratio == pytest.approx(float(ratios[1]))


def test_a_row_may_fail_as_a_whole_though_no_element_does() -> None:
    a = torch.ones(1, 100)
    _, found = compare_rows(a, a + 0.15, LOOSE)  # elements: 0.2 allowed
    assert found is not None
    assert found.num_beyond == 0
    assert found.ratio == pytest.approx(0.15)


def test_the_absolute_part_counts_in_units_of_the_row() -> None:
    small = torch.tensor([[1.0, 0.0]]) * 1e-3
    off = torch.tensor([[1.0, 0.05]]) * 1e-3
    tolerance = Tolerance(0.01, 0.0, 1.0, "for this test")
    assert compare_rows(small, off, tolerance)[1].allowed == pytest.approx(0.01 * 1e-3 / 2**0.5)
    assert compare_rows(small, off, LOOSE)[1] is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_side_alone_is_no_closeness(bad: float) -> None:
    a = torch.ones(2, 3)
    b = a.clone()
    b[1, 2] = bad
    for x, y in ((a, b), (b, a)):
        ratios, found = compare_rows(x, y, LOOSE)
        assert (found.row, found.index) == (1, (2,))
        assert ratios[1] == math.inf


def test_ids_are_exact() -> None:
    ids = torch.tensor([5, 6, 7])
    ratios, found = compare_rows(ids, torch.tensor([5, 6, 8]), EXACT)
    assert (found.row, found.index, found.a, found.b) == (2, (), 7.0, 8.0)
    assert ratios.tolist() == pytest.approx([0.0, 0.0, 1 / (110 / 3) ** 0.5])


def test_a_row_of_one_number_is_measured_by_its_column() -> None:
    """The third is what two sums of large terms left."""
    a = torch.tensor([[1.0], [-1.0], [1e-6]])
    assert compare_rows(a, a + 1e-7, LOOSE)[1] is None
    _, found = compare_rows(a, a + torch.tensor([[0.0], [0.0], [0.5]]), LOOSE)
    assert found.row == 2


def test_an_expected_row_of_zeros() -> None:
    assert error_ratio(torch.zeros(4), torch.tensor([0.0, 3.0, 0.0, 4.0])) == 5.0


def test_every_kind_has_a_row_of_the_table() -> None:
    assert set(ROWS.values()) <= set(TABLE)
    for kind in ROWS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert 0 < allowed_between(kind, dtype, 0.0).rms <= TABLE["logits"][dtype].rms


def test_what_was_inherited_is_allowed_up_to_twice_the_whole_model_s_error() -> None:
    own = TABLE["norm"][torch.bfloat16]
    whole = TABLE["logits"][torch.bfloat16].rms
    exact_inputs = allowed_between("norm", torch.bfloat16, 0.0)
    assert (exact_inputs.atol, exact_inputs.rtol, exact_inputs.rms) == (own.atol, own.rtol, own.rms)
    grown = allowed_between("norm", torch.bfloat16, 0.01)
    assert grown.rms == pytest.approx(own.rms + GROWTH * 0.01)
    assert grown.rtol == pytest.approx(own.rtol + GROWTH * 0.01)
    assert grown.atol == pytest.approx(own.atol + PEAK * GROWTH * 0.01)
    assert allowed_between("norm", torch.bfloat16, 1.0).rms == INSIDE * whole
    assert allowed_between("logits", torch.bfloat16, 1.0) == TABLE["logits"][torch.bfloat16]
    assert allowed_between("ids", torch.bfloat16, 1.0) == EXACT
