"""`diptych bench allreduce`: sums between two processes, and the numbers of its table."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from typer.testing import CliRunner

from diptych.shared import registry
from diptych.shared.tools.bench.all_reduce import KIB, SumsPlan, SumsResult, time_sums
from diptych.shared.tools.cli import app
from diptych.shared.tools.commands.bench_all_reduce import AllReduceBenchmark


def test_sums_between_two_processes(tmp_path: Path) -> None:
    file, plot = tmp_path / "r.json", tmp_path / "plot.svg"
    options = ["--sizes", "8,64", "--repeats", "2", "--device", "cpu", "--link", "10"]
    result = CliRunner().invoke(app, ["bench", "allreduce", *options, "-o", str(file), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "2 ranks, cpu: us of a sum, bus bandwidth" in result.stdout
    assert plot.read_text().startswith("<?xml")
    data = json.loads(file.read_text())
    assert (data["dtype"], data["num_ranks"], data["num_repeats"]) == ("float32", 2, 2)
    assert [row["num_bytes"] for row in data["results"]] == [8192, 65536]
    for row in data["results"]:
        assert list(row["seconds"]) == list(registry.PANELS)
        assert row["bound_s"] == row["num_bytes"] / 10e9
        for name, seconds in row["seconds"].items():
            assert row["bus_bytes_per_s"][name] == pytest.approx(row["num_bytes"] / seconds)


def test_four_ranks_send_three_quarters_twice() -> None:
    result = SumsResult(4000, 4, {"a": 0.5}, link=1000.0)
    assert (result.bus_bytes, result.bound, result.bus_bandwidth("a")) == (6000, 6.0, 12_000)
    assert SumsResult(4000, 4, {"a": 0.5}).bound is None


def test_an_implementation_may_lack_a_size() -> None:
    benchmark = AllReduceBenchmark(SumsPlan((KIB,)), None)
    table: Any = benchmark.table(
        [SumsResult(KIB, 2, {"a": 1e-6, "b": 2e-6}), SumsResult(9 * KIB, 2, {"a": 3e-6})]
    )
    assert [column.header for column in table.columns] == ["KB", "a, us", "a, GB/s", "b, us", "b, GB/s"]
    assert list(table.columns[3].cells) == ["2.0", ""]


def test_a_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation of which each rank returns its own input."""
    load = registry.load

    def wrong(component: str, choice: str) -> Any:
        found = load(component, choice)
        if choice == "reference":
            return found  # it also gathers the times
        return type("Wrong", (found,), {"all_reduce": lambda self, x: x})

    monkeypatch.setattr(registry, "load", wrong)
    store, plan = HashStore(), SumsPlan((KIB,), num_repeats=1)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(list, time_sums(plan, store, rank)) for rank in range(2)]
    for rank in ranks:
        with pytest.raises(RuntimeError, match="optimized: a sum of 1024 bytes over 2 ranks is wrong"):
            rank.result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "8;64"], "--sizes takes numbers separated by ',', got '8;64'"),
        (["--sizes", "8,0"], "sizes must be distinct multiples of 1024 bytes, got (8192, 0)"),
        (["--sizes", "8,8"], "sizes must be distinct multiples of 1024 bytes, got (8192, 8192)"),
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--device", "cuda", "--ranks", "99"], "ranks=99: each needs a GPU, and this computer has"),
        (["--link", "0"], "--link must be more than 0 GB/s, got 0"),
        (["--plot", "x.foo"], "and x.foo has none of these endings"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "allreduce", *options], prog_name="diptych")
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]


def test_ranks_have_a_type_for_their_device() -> None:
    assert SumsPlan((KIB,)).dtype == torch.float32
    with pytest.raises(ValueError, match="ranks must be at least 2, got 1"):
        SumsPlan((KIB,), num_ranks=1)
