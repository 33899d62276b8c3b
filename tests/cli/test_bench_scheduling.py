"""`diptych bench scheduling` and `diptych bench prefix-cache` in small: they measure what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from shared.bench.prefix_cache import CacheCase, FullCache
from shared.bench.scheduling import POLICIES, Rehearsal, SchedulingCase

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
    options = ("--waiting", "3,9", "--running", "4", "--policy", "lof,dfs-weight", "--seconds", "0.01")
    data = run(diptych, tmp_path, "scheduling", *options)
    cases = [(one["panel"], one["policy"], one["num_waiting"]) for one in data["results"]]
    assert sorted(cases) == sorted(
        (panel, policy, number)
        for panel in ("reference", "optimized")
        for policy in ("lof", "dfs-weight")
        for number in (3, 9)
    )
    assert all(one["first_pass_s"] > 0 and min(one["blocks_s"]) > 0 for one in data["results"])


@pytest.mark.parametrize("policy", POLICIES)
def test_both_panels_rehearse_the_same(policy: str) -> None:
    """The same requests are admitted, step by step; numbers of waiting and running stay."""
    seen = []
    for panel in ("reference", "optimized"):
        rehearsal = Rehearsal(SchedulingCase(panel, policy, num_waiting=20, num_running=6))
        rehearsal.fill()
        admitted = []
        for _ in range(25):
            assert rehearsal.step() > 0
            admitted.append(rehearsal.running[-1].rid)
            assert (len(rehearsal.waiting_queue), len(rehearsal.running)) == (20, 6)
        seen.append(admitted)
    assert seen[0] == seen[1]


def test_prefix_cache(diptych: Diptych, tmp_path: Path) -> None:
    options = ("--tokens", "256", "--sequence-len", "32", "--depth", "1,2", "--page-size", "1,16")
    data = run(diptych, tmp_path, "prefix-cache", *options, "--repeats", "3")
    assert len(data["results"]) == 8
    for one in data["results"]:
        assert {name: len(times) for name, times in one["times_s"].items()} == {
            "match": 3,
            "insert": 3,
            "evict": 3,
        }


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
    ],
)
def test_wrong_options(diptych: Diptych, command: str, option: tuple[str, str], message: str) -> None:
    result = diptych("bench", command, *option)
    assert result.exit_code == 2
    assert message in result.output
