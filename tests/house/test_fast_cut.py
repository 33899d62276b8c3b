"""`make test` stays short."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.conftest import is_fast_cut
from tests.fast_cut import MOST_TESTS, off_diagonal


def test_it_has_no_more_tests(request: pytest.FixtureRequest) -> None:
    """More values of a grid belong to the whole run: `pytest.param(..., marks=pytest.mark.full)`."""
    if is_fast_cut(request.config):
        files = Counter(item.nodeid.partition("::")[0] for item in request.session.items)
        assert files.total() <= MOST_TESTS, files.most_common(10)


def test_each_value_of_each_axis_is_kept() -> None:
    grid = [SimpleNamespace(callspec=SimpleNamespace(_idlist=[a, b])) for a in "xyz" for b in "pq"]
    left_out = [item.callspec._idlist for item in off_diagonal(grid)]
    assert left_out == [["x", "q"], ["y", "p"], ["z", "p"]]
    assert off_diagonal(grid[1:]) == []  # no whole grid: chosen by hand
