"""`diptych bench offline` on the built-in model: every workload in small, its file, its errors, Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.bench import plots
from diptych.shared.tools.bench.drive import Run
from diptych.shared.tools.bench.offline import CaseResult
from diptych.shared.tools.bench.peers import ROWS
from diptych.shared.tools.bench.workloads import Offline256
from diptych.shared.tools.commands.bench_offline import make_workload, parse_range
from diptych.shared.tools.commands.bench_run import Progress, check_files, check_folder
from diptych.shared.tools.commands.offline_benchmark import OfflineBenchmark, engines_for

Diptych = Callable[..., Result]

OFFLINE = ["bench", "offline", "--device", "cpu", "--panel", "reference", "--max-total-tokens", "2048"]
FEW = ["--input-len", "8", "--output-len", "6", "--repeats", "2", "--no-limit"]


def run(diptych: Diptych, file: Path, *options: str) -> dict[str, Any]:
    result = diptych(*OFFLINE, *options, "--output", str(file))
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def test_uniform(diptych: Diptych, tmp_path: Path) -> None:
    data = run(diptych, tmp_path / "result.json", "--concurrency", "1,3", *FEW)
    assert [row["case"] for row in data["results"]] == ["concurrency 1", "concurrency 3"]
    for row in data["results"]:
        speed = row["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert len(row["runs"]) == 2
        for each in row["runs"]:
            # One step of prefill gives the first token, five of decode the others.
            assert each["num_steps"] == 6
            assert each["tokens_per_s"] == pytest.approx(each["num_output_tokens"] / each["total_s"])
        assert 0 < row["idle"]["share"] < 1
        assert row["idle"]["num_steps"] == 6
        assert row["components"]["scheduler"] == "reference"
        assert row["flags"]["model"] == "tiny-dense"
        assert (row["num_pool_tokens"], row["dtype"]) == (2048, "float32")
    assert data["results"][0]["time_to_first_token_s"] > 0
    assert data["results"][1]["time_to_first_token_s"] is None
    assert data["versions"]["torch"]
    assert data["machine"]["num_torch_threads"] == 1
    assert data["workload"]["name"] == "uniform"
    assert (data["workload"]["seed"], data["num_repeats"], data["num_warm_ups"]) == (0, 2, 1)
    assert data["is_interrupted"] is False
    assert "peers" not in data


def test_offline_256_in_small(diptych: Diptych, tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.svg"
    options = ["--num-requests", "5", "--input-len", "4-9", "--output-len", "3-6", "--repeats", "1"]
    files = ["--trace", str(trace), "--plot", str(plot)]
    data = run(diptych, tmp_path / "r.json", "--workload", "offline-256", *options, *files)
    [row] = data["results"]
    assert row["num_requests"] == 5
    bound = row["bound"]
    assert bound["share"] == pytest.approx(row["tokens_per_s"]["median"] / bound["tokens_per_s"])
    assert data["ceilings"]["bytes_per_s"] > 1e8
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("extend") == 1
    assert names.count("schedule") == row["idle"]["num_steps"]
    assert plot.read_text().startswith("<?xml")


@pytest.mark.full
def test_engines_of_one_and_two_ranks(diptych: Diptych, tmp_path: Path) -> None:
    file, plot = tmp_path / "r.json", tmp_path / "plot.svg"
    options = ["--scale-tp", "2,1", "--concurrency", "2", "--plot", str(plot)]
    result = diptych(*OFFLINE, *options, *FEW, "-o", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["results"]
    assert [(row["case"], row["flags"]["tp"]) for row in rows] == [
        ("concurrency 2, tp 1", 1), ("concurrency 2, tp 2", 2),
    ]  # fmt: skip
    speeds = [row["tokens_per_s"]["median"] for row in rows]
    assert plot.read_text().startswith("<?xml")
    ratio = f"{speeds[1] / speeds[0]:.2f}"
    assert f"concurrency 2: tp 2 has {ratio} times the throughput of tp 1 (ideal 2)" in result.output


def test_ranks_are_compared_with_the_fewest(tmp_path: Path) -> None:
    workload: Any = make_workload("uniform", {"concurrency": (1, 3)})
    benchmark = OfflineBenchmark(workload, {}, 1, 0, has_bound=False, tp_sizes=(4, 2))
    assert benchmark.engines() == [{"tp": 4}, {"tp": 2}]
    results = [
        CaseResult(case, f"{case.name}, tp {tp}", runs=[Run(1.0, tp * tokens + 10, 1, 0, 1, 0, None)],
                   facts={"flags": {"tp": tp, "dp": 1, "model": "m", "device": "cpu"}})
        for tp in (4, 2)
        for case, tokens in zip(workload.cases(100), (10, 20))
    ]  # fmt: skip
    assert list(benchmark.notes(results)) == [
        "concurrency 1: tp 4 has 1.67 times the throughput of tp 2 (ideal 2)",
        "concurrency 3: tp 4 has 1.80 times the throughput of tp 2 (ideal 2)",
    ]
    benchmark.draw(tmp_path / "p.svg", results)
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_shared_prefix_with_and_without_cache(diptych: Diptych, tmp_path: Path) -> None:
    numbers = ["--groups", "2", "--group-size", "3", "--shared-len", "24", "--max-running-requests", "1"]
    result = diptych(*OFFLINE, "--workload", "shared-prefix", *numbers, *FEW, "-o", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    assert "times the throughput with the radix cache" in result.output
    without, with_cache = json.loads((tmp_path / "r.json").read_text())["results"]
    assert (without["case"], with_cache["case"]) == (
        "2 groups of 3, without radix cache",
        "2 groups of 3, with radix cache",
    )
    assert (without["flags"]["disable_radix_cache"], with_cache["flags"]["disable_radix_cache"]) == (
        True,
        False,
    )
    assert (without["hit_rate"], without["ideal_hit_rate"]) == (0, 0)
    assert with_cache["hit_rate"] == with_cache["ideal_hit_rate"] == pytest.approx(4 * 24 / (6 * 32))


def test_long_prompts_in_small(diptych: Diptych, tmp_path: Path) -> None:
    plot = tmp_path / "itl.png"
    numbers = ["--num-requests", "2", "--input-len", "8", "--output-len", "300", "--long-len", "64"]
    numbers += ["--long-output-len", "2", "--interval", "0.05", "--seconds", "0.2", "--repeats", "1"]
    numbers += ["--warm-ups", "0", "--plot", str(plot)]
    data = run(diptych, tmp_path / "r.json", "--workload", "long-prompts", *numbers)
    [row] = data["results"]
    [repeat] = row["runs"]
    assert repeat["without"]["num_arrivals"] == 0
    assert 1 <= repeat["with_arrivals"]["num_arrivals"] <= 4
    itl = [repeat[name]["itl_s"] for name in ("without", "with_arrivals")]
    assert row["p99_ratio"] == pytest.approx(itl[1]["p99"] / itl[0]["p99"])
    assert all(0 < each["p50"] <= each["p90"] <= each["p99"] <= each["max"] for each in itl)
    assert plot.stat().st_size > 0


def interrupt_the_second_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 6 steps a run: behind the warm-up and the first repeat."""
    steps = iter(range(1, 1000))
    step = LLM.step

    def interrupted(self: LLM) -> bool:
        if self.scheduler.has_work() and next(steps) == 15:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLM, "step", interrupted)


def test_ctrl_c_keeps_what_was_complete(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_the_second_repeat(monkeypatch)
    file = tmp_path / "result.json"
    result = diptych(*OFFLINE, "--concurrency", "2,3", *FEW, "-o", str(file))
    assert result.exit_code == 130, result.output
    data = json.loads(file.read_text())
    assert data["is_interrupted"] is True
    assert [len(row["runs"]) for row in data["results"]] == [1]
    assert "concurrency 2" in result.output


def test_ctrl_c_before_anything_was_complete(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: LLM) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "step", interrupted)
    file = tmp_path / "result.json"
    result = diptych(*OFFLINE, "--concurrency", "2", *FEW, "-o", str(file))
    assert result.exit_code == 130
    assert "interrupted before the first result; nothing is written" in result.output
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--workload", "offline"],
            "--workload must be one of offline-256, shared-prefix, long-prompts, uniform",
        ),
        (
            ["--groups", "3"],
            "--groups does not apply to the uniform workload, which has --concurrency, --input-len",
        ),
        (
            ["--workload", "offline-256", "--concurrency", "3"],
            "--concurrency does not apply to the offline-256 workload",
        ),
        (["--input-len", "3-"], "--input-len takes a number or two with - between them, got '3-'"),
        (["--output-len", "0"], "output_len must be a length of at least 1"),
        (["--concurrency", "1;16"], "--concurrency takes numbers separated by ',', got '1;16'"),
        (["--scale-tp", "1,2", "--tp", "2"], "give --scale-tp 1,2 or --tp 2, not both"),
        (["--scale-tp", "1,1"], "--scale-tp takes distinct numbers of at least 1, got '1,1'"),
        (["--scale-tp", "2", "--workload", "shared-prefix"], "the workload is shared-prefix"),
        (["--trace", "no/such/folder/trace.json"], "for trace.json"),
        (["--output", "."], ". is a folder: name a file in it"),
        (["--plot", "x.foo"], "and x.foo has none of these endings"),
        (["--plot", "picture"], "--plot draws "),
        (["--context-len", "64", "--output-len", "600", "--no-limit"], "must fit into the context (64)"),
    ],
)
def test_wrong_options_are_one_line(diptych: Diptych, options: list[str], message: str) -> None:
    result = diptych(*OFFLINE, *options)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_a_plot_without_matplotlib_is_refused_before_measuring(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = diptych(*OFFLINE, "--plot", str(tmp_path / "plot.svg"))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["error: --plot needs matplotlib: pip install 'diptych[plots]'"]


def test_only_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_files(None, tmp_path / "r.json", None)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    check_files(tmp_path / "PLOT.SVG", None)


def test_what_the_system_refuses_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a read-only file system does it, or the permissions for who is not root."""

    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    for check, path in ((check_files, tmp_path / "r.json"), (check_folder, tmp_path / "a" / "b")):
        with pytest.raises(ValueError, match=f"cannot write into {tmp_path}: Read-only file system"):
            check(path)
    there = tmp_path / "there.json"
    there.write_text("{}")
    check_files(None, there)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"there\.json exists and cannot be written"):
        check_files(None, there)


@pytest.mark.parametrize(("workload", "drawing"), [("uniform", "plot_speeds"), ("long-prompts", "plot_itl")])
def test_the_numbers_are_kept_when_drawing_fails(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str, drawing: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(plots, drawing, fail)
    numbers = ["--workload", workload, "--input-len", "8", "--output-len", "6", "--repeats", "1"]
    numbers += ["--warm-ups", "0", "--no-limit"]
    if workload == "long-prompts":
        numbers += ["--num-requests", "2", "--output-len", "300", "--long-len", "64", "--interval", "0.05"]
        numbers += ["--long-output-len", "2", "--seconds", "0.2"]
    file = tmp_path / "r.json"
    result = diptych(*OFFLINE, *numbers, "--plot", str(tmp_path / "plot.svg"), "-o", str(file))
    assert (result.exit_code, "no space left" in result.stderr) == (2, True)
    assert json.loads(file.read_text())["results"]


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress() as progress:
        on_tokens = progress.on_run("warm-up", 40)
        assert on_tokens is not None
        on_tokens(10)
        on_tokens(25)
        assert (progress.bar.n, progress.bar.total) == (25, 40)
        progress.on_run("1 of 3", 40)
        assert progress.bar.n == 0
    assert progress.bar is None


def test_another_error_than_an_interrupt_is_not_swallowed() -> None:
    with pytest.raises(ValueError, match="x"), Progress() as progress:
        raise ValueError("x")
    assert not progress.is_interrupted


def test_numbers_take_the_place_of_the_workloads_own() -> None:
    assert make_workload("offline-256", {"num_requests": None, "seed": None}) == Offline256()
    assert make_workload("offline-256", {"seed": 4, "input_len": (3, 5)}) == Offline256(
        seed=4, input_len=(3, 5)
    )
    assert parse_range("--input-len", "100-1024") == (100, 1024)
    assert parse_range("--input-len", "7") == (7, 7)


def test_shared_prefix_starts_two_engines_unless_the_cache_is_off() -> None:
    shared_prefix = make_workload("shared-prefix", {})
    assert engines_for(shared_prefix, {}) == [{"disable_radix_cache": True}, {}]
    assert engines_for(shared_prefix, {"disable_radix_cache": True}) == [{}]
    assert engines_for(Offline256(), {}) == [{}]


def test_the_table_is_compared_with() -> None:
    found = ROWS["Qwen3-8B"].compare_offline(10_329.0)
    assert (round(found.of_bound, 3), round(found.of_best_peer, 3)) == (0.796, 1.1)
    assert str(found).startswith(
        "0.80 of the roofline bound (12,975 tokens/s at 4.3 TB/s), 1.10 of the best peer"
    )
