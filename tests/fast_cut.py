"""What of grids `make test` runs, and what the run has cost. A plugin of pytest."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import pytest

CORE_SECONDS = 960
"""Eight minutes on two cores."""
MOST_TESTS = 10_000
"""tests/house/test_fast_cut.py holds it; seconds depend on the computer."""
WHOLE = ("dialect", "clause", "bug", "address", "host", "variable", "panel", "impl")
"""Parameters whose every value meets all values of the others."""
OF_RANKS = "tests/parallel/"
"""Tests of several engines at a time: there a panel is an axis like the others."""
SECONDS: Counter[str] = Counter()
"""Of each file."""


@pytest.hookimpl(trylast=True)  # behind the choice of `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test with several `parametrize` is a grid, of which a diagonal is kept: each value of each axis, and
    not every pair."""
    grids: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and len(call._idlist) > 1:
            whole = [name for name in WHOLE if name != "panel" or not item.nodeid.startswith(OF_RANKS)]
            fixed = (repr(call.params[name]) for name in whole if name in call.params)
            grids.setdefault((item.nodeid.partition("[")[0], *fixed), []).append(item)
    dropped = {item for grid in grids.values() for item in off_diagonal(grid)}
    if dropped:
        config.hook.pytest_deselected(items=[*dropped])
        items[:] = [item for item in items if item not in dropped]


def off_diagonal(grid: list[Any]) -> list[Any]:
    points = [tuple(item.callspec._idlist) for item in grid]
    axes = [list(dict.fromkeys(axis)) for axis in zip(*points)]
    if len(points) < math.prod(map(len, axes)):  # chosen by hand
        return []
    # A lap of an axis later its values come further on, so that those of equal axes meet others too.
    diagonal = {
        tuple(axis[(i + i // len(axis) * number) % len(axis)] for number, axis in enumerate(axes))
        for i in range(max(map(len, axes)))
    }
    return [item for item, point in zip(grid, points) if point not in diagonal]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if session.config.getoption("forks", 0):
        from tests.forked import share_server

        share_server()  # imports what engines and servers import, once


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(SECONDS) > 100:  # a whole run; its workers have ended, so that their time counts here
        used = sum(os.times()[:4])
        most = ", ".join(f"{file} {seconds:.0f}" for file, seconds in SECONDS.most_common(10))
        terminalreporter.write_line(f"{used:.0f} core-seconds, of {CORE_SECONDS}. Most seconds: {most}")
