"""`diptych bench latency` on the built-in model, and the timeline of `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from diptych.shared.tools.bench import plots
from diptych.shared.tools.bench.peers import ROWS
from tests.cli.test_bench import interrupt_the_second_repeat

Diptych = Callable[..., Result]

ENGINE = ["--device", "cpu", "--panel", "reference", "--max-total-tokens", "1024"]
LATENCY = ["bench", "latency", *ENGINE, "--input-len", "12", "--output-len", "6"]


def test_latency_of_some_streams(diptych: Diptych, tmp_path: Path) -> None:
    file, trace, plot = (tmp_path / name for name in ("r.json", "trace.json", "plot.svg"))
    options = ["--concurrency", "1,3", "--repeats", "2", "--step", "--trace", str(trace), "--plot", str(plot)]
    result = diptych(*LATENCY, *options, "-o", str(file))
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert [row["concurrency"] for row in data["results"]] == [1, 3]
    for row in data["results"]:
        itl = row["itl_s"]
        assert 0 < itl["p50"] <= itl["p90"] <= itl["p99"] <= itl["max"]
        assert row["time_to_first_token_s"] > 0
        assert row["overhead"] == pytest.approx(row["time_per_token_s"] / row["step_s"] - 1)
        assert row["step_context_len"] == 15
        assert row["bound_s"] > 0
        assert [run["itl_s"]["num_intervals"] for run in row["runs"]] == [5 * row["concurrency"]] * 2
        assert row["idle"]["num_steps"] == 6
    assert data["flags"]["max_total_tokens"] == 1024
    assert data["num_pool_tokens"] == 1024
    assert data["ceilings"]["flops_per_s"] > 0
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert (names.count("extend"), names.count("decode")) == (1, 5)
    assert plot.read_text().startswith("<?xml")


def test_on_a_cpu_the_bare_step_is_measured_only_when_asked_for(diptych: Diptych, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    result = diptych(*LATENCY, "--repeats", "1", "--warm-ups", "0", "--no-limit", "-o", str(file))
    assert result.exit_code == 0, result.output
    [row] = json.loads(file.read_text())["results"]
    assert (row["step_s"], row["overhead"], row["bound_s"]) == (None, None, None)


def test_ctrl_c_keeps_what_was_complete(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_the_second_repeat(monkeypatch)
    file = tmp_path / "r.json"
    result = diptych(*LATENCY, "--no-limit", "-o", str(file))
    assert result.exit_code == 130, result.output
    data = json.loads(file.read_text())
    assert data["is_interrupted"] is True
    assert [len(row["runs"]) for row in data["results"]] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1;2"], "--concurrency takes numbers separated by ',', got '1;2'"),
        (["--disaggregation", "--step"], "a step alone is measured with tp only"),
        (["--concurrency", "0"], "concurrency must be at least 1, got 0"),
        (["--output-len", "2"], "output_len must be at least 3, got 2"),
        (["--output-len", "5000", "--no-limit"], "must fit into the context (2048)"),
        (["--output", "no/such/folder/r.json"], "for r.json"),
        (["--trace", "."], ". is a folder: name a file in it"),
    ],
)
def test_wrong_options_are_one_line(diptych: Diptych, options: list[str], message: str) -> None:
    result = diptych(*LATENCY, *options)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_the_table_is_compared_with_in_speed() -> None:
    found = ROWS["Qwen3-8B"].compare_stream(4.1)
    assert (round(found.of_bound, 3), round(found.of_best_peer, 3)) == (0.863, 1.256)
    assert str(found).startswith(
        "0.86 of the roofline bound (3.54 ms at 4.3 TB/s), 1.26 of the best peer (SGLang"
    )


def test_generate_writes_a_timeline(diptych: Diptych, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = diptych("generate", *ENGINE, "-n", "4", "--ignore-eos", "--trace", str(file), "Hello", "Who?")
    assert result.exit_code == 0, result.output
    assert "idle between steps" in result.stderr.splitlines()[-1]
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert (names.count("extend"), names.count("decode"), names.count("receive")) == (2, 6, 2)
    assert {"schedule", "prepare", "launch", "process results", "detokenise", "free_tokens"} <= set(names)


@pytest.mark.parametrize(
    ("file", "message"),
    [("no/such/folder/trace.json", "for trace.json"), (".", ". is a folder: name a file in it")],
)
def test_generate_refuses_a_timeline_that_cannot_be_kept(diptych: Diptych, file: str, message: str) -> None:
    result = diptych("generate", "--trace", file, "Hello")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_the_numbers_are_kept_when_drawing_fails(
    diptych: Diptych, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(plots, "plot_itl", fail)
    file = tmp_path / "r.json"
    options = ["--repeats", "1", "--warm-ups", "0", "--no-limit", "--plot", str(tmp_path / "plot.svg")]
    result = diptych(*LATENCY, *options, "-o", str(file))
    assert (result.exit_code, "no space left" in result.stderr) == (2, True)
    assert len(json.loads(file.read_text())["results"]) == 1
