"""Counts of what a small pool costs: repeatable, and nothing is lost or counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.shared.tools.bench.small_pools import Load, count, plot, requests_of

LOADS = (Load("all", 1.0, num_reqs=12), Load("a quarter", 0.25, num_reqs=12))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_counts(load: Load, tmp_path: Path) -> None:
    counts = [count(load, "reference", percentage, 0.1) for percentage in (50, 100)]
    assert counts == [count(load, "reference", percentage, 0.1) for percentage in (50, 100)]
    small, large = counts
    assert small.num_steps > large.num_steps
    assert large.useful_share == 1.0
    assert (small.useful_share < 1.0) == (small.num_retractions > 0)
    overlapped = count(load, "optimized", 100, 0.1)
    num_stopped = sum(max_new > num_out for _, max_new, _, num_out in requests_of(load))
    assert overlapped.num_computed_tokens == large.num_computed_tokens + num_stopped, "one surplus step each"
    plot(counts, tmp_path / "counts.svg")
    assert (tmp_path / "counts.svg").read_text().startswith("<?xml")
