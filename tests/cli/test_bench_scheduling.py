"""`diptych bench scheduling` and `diptych bench prefix-cache` in small: they measure what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from diptych.shared.tools.bench import plots
from diptych.shared.tools.bench.prefix_cache import CacheCase, FullCache
from diptych.shared.tools.bench.scheduling import POLICIES, Rehearsal, SchedulingCase

Diptych = Callable[..., Result]


def run(diptych: Diptych, tmp_path: Path, *options: str) -> dict[str, Any]:
    file, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    result = diptych("bench", *options, "--plot", str(plot), "--output", str(file))
    assert result.exit_code == 0, result.output
    assert plot.read_text().startswith("<?xml")
    data: dict[str, Any] = json.loads(file.read_text())
    assert data["versions"]["torch"]
    return data


def test_scheduling(diptych: Diptych, tmp_path: Path) -> None:
    options = ("--waiting", "0,9", "--running", "4", "--policy", "lof,dfs-weight", "--seconds", "0.01")
    data = run(diptych, tmp_path, "scheduling", *options)
    cases = [(one["panel"], one["policy"], one["num_waiting"]) for one in data["results"]]
    assert sorted(cases) == sorted(
        (panel, policy, number)
        for panel in ("reference", "optimized")
        for policy in ("lof", "dfs-weight")
        for number in (0, 9)
    )
    assert all(one["first_pass_s"] > 0 and one["median_s"] >= one["least_s"] > 0 for one in data["results"])


@pytest.mark.parametrize(
    "others", [{}, {"num_adapters": 3, "num_cached": 1000, "has_grammars": True}], ids=["alone", "others"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_both_panels_rehearse_the_same(policy: str, others: dict[str, int]) -> None:
    """The same requests are admitted, step by step; numbers of waiting and running stay."""
    seen = []
    for panel in ("reference", "optimized"):
        rehearsal = Rehearsal(SchedulingCase(panel, policy, num_waiting=20, num_running=6, **others))
        assert len(list(rehearsal.tree.nodes())) == (100 if others else 0)
        assert rehearsal.tree.evictable_size() == others.get("num_cached", 0)
        rehearsal.fill()
        admitted = []
        for _ in range(25):
            assert rehearsal.step() > 0
            admitted.append(rehearsal.running[-1].rid)
            assert (len(rehearsal.waiting_queue), len(rehearsal.running)) == (20, 6)
        seen.append(admitted)
    assert seen[0] == seen[1]


def test_a_plot_keeps_the_point_at_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    make_figure = plots.new_figure

    def figure(title: str) -> Any:
        drawn.append(make_figure(title))
        return drawn[-1]

    monkeypatch.setattr(plots, "new_figure", figure)
    for first in (0, 1):
        points = [("reference", first, 1.0), ("reference", 10, 2.0)]
        plots.plot_growth(tmp_path / "plot.svg", "growth", points, "waiting", "ms")
    (_, with_zero), (_, without) = drawn
    assert (with_zero.get_xscale(), without.get_xscale()) == ("symlog", "log")
    assert with_zero.transData.transform((0, 1.0))[0] > with_zero.bbox.x0


def test_prefix_cache(diptych: Diptych, tmp_path: Path) -> None:
    options = ("--tokens", "256", "--sequence-len", "32", "--depth", "1,2", "--page-size", "1,16")
    data = run(diptych, tmp_path, "prefix-cache", *options, "--repeats", "3")
    assert len(data["results"]) == 8
    for one in data["results"]:
        assert [*one["times_s"]] == ["match", "insert", "evict"]
        for times in one["times_s"].values():
            assert 0 <= times["min"] <= times["median"] <= times["max"]
            assert times["num_repeats"] == 3


def test_sequences_are_whole_and_that_is_what_is_reported(diptych: Diptych, tmp_path: Path) -> None:
    options = ("--tokens", "10,1025", "--page-size", "1", "--panel", "reference", "--repeats", "1")
    data = run(diptych, tmp_path, "prefix-cache", *options)
    assert [(one["num_tokens"], one["num_cached_tokens"]) for one in data["results"]] == [
        (10, 1024),
        (1025, 2048),
    ]
    case = CacheCase("reference", 1025)
    assert FullCache(case).tree.evictable_size() == case.num_cached_tokens


@pytest.mark.parametrize("command", ["scheduling", "prefix-cache"])
def test_the_numbers_are_kept_when_drawing_fails(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(plots, "plot_growth", fail)
    file = tmp_path / "result.json"
    small = {
        "scheduling": ("--waiting", "3", "--running", "4", "--policy", "fcfs", "--seconds", "0.001"),
        "prefix-cache": ("--tokens", "10", "--repeats", "1"),
    }
    options = (*small[command], "--panel", "reference", "--plot", str(tmp_path / "plot.svg"))
    result = diptych("bench", command, *options, "--output", str(file))
    assert (result.exit_code, "no space left" in result.stderr) == (2, True)
    assert json.loads(file.read_text())["results"]


@pytest.mark.parametrize("panel", ["reference", "optimized"])
@pytest.mark.parametrize(("depth", "page_size"), [(1, 1), (4, 1), (2, 16)])
def test_the_tree_is_as_the_case_says_and_stays_so(panel: str, depth: int, page_size: int) -> None:
    full = FullCache(CacheCase(panel, 640, 64, depth, page_size))
    for _ in range(15):
        assert full.tree.evictable_size() == 640
        nodes = list(full.tree.nodes())
        assert [len(node.key) for node in nodes] == [64 // depth] * (10 * depth)
        for sequence in full.by_last_use:
            assert len(sequence) == 64
        full.cycle()


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("scheduling", ("--policy", "soonest"), "--policy takes fcfs, fcfs by priority"),
        ("scheduling", ("--waiting", "many"), "--waiting takes numbers"),
        ("prefix-cache", ("--panel", "both"), "--panel takes reference, optimized"),
        ("prefix-cache", ("--depth", "3"), "1024 tokens has no 3 nodes of whole pages of 1"),
        ("scheduling", ("--waiting", "3,-5"), "waiting must be at least 0, got -5"),
        ("scheduling", ("--seconds", "0"), "--seconds must be finite and more than 0, got 0"),
        ("scheduling", ("--seconds", "-1"), "--seconds must be finite and more than 0, got -1"),
        ("scheduling", ("--seconds", "nan"), "--seconds must be finite and more than 0, got nan"),
        ("scheduling", ("--seconds", "inf"), "--seconds must be finite and more than 0, got inf"),
        ("prefix-cache", ("--tokens", "0"), "tokens must be at least 1, got 0"),
        ("prefix-cache", ("--tokens", "-5"), "tokens must be at least 1, got -5"),
        ("prefix-cache", ("--tokens", "10,000"), "tokens must be at least 1, got 0"),
        ("prefix-cache", ("--page-size", "1,0"), "page_size must be at least 1, got 0"),
        ("prefix-cache", ("--depth", "0"), "depth must be at least 1, got 0"),
        ("prefix-cache", ("--sequence-len", "0"), "sequence_len must be at least 1, got 0"),
        ("prefix-cache", ("--sequence-len", "-4"), "sequence_len must be at least 1, got -4"),
    ],
)
def test_wrong_options(diptych: Diptych, command: str, option: tuple[str, str], message: str) -> None:
    result = diptych("bench", command, *option)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()  # nothing was measured before
    assert line.startswith("error: ")
    assert message in line
