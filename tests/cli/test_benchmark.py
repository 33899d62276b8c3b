"""What the benchmarks share: tables, files, and what is kept when a measurement ends early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from diptych.shared.tools.commands.bench_run import Progress
from diptych.shared.tools.commands.benchmark import Benchmark, Column, run


class Squares(Benchmark):
    name = "squares"
    columns = (
        Column("number", lambda result: str(result["number"]), is_text=True),
        Column("square", lambda result: str(result["number"] ** 2)),
        Column("cube", lambda result: None),
    )

    def notes(self, results: list[Any]) -> list[str]:
        self.facts["sum"] = sum(result["number"] for result in results)
        return [f"sum {self.facts['sum']}"]

    def as_json(self, result: Any) -> dict[str, Any]:
        return dict(result)


class Ends(Squares):
    """Ends after two cases."""

    error: BaseException

    def measure(self, progress: Progress) -> None:
        super().measure(progress)
        raise self.error


def measured(number: int) -> dict[str, int]:
    return {"number": number}


def test_table_notes_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    run(Squares([3, 5], measured), output=file)
    out = capsys.readouterr()
    assert "square" in out.out
    assert "25" in out.out
    assert "cube" not in out.out, "a column without a cell"
    assert "sum 8" in out.out
    assert out.err.split() == ["3", "5"], "progress"
    data = json.loads(file.read_text())
    assert data["benchmark"] == "squares"
    assert (data["sum"], data["is_interrupted"]) == (8, False)
    assert data["results"] == [{"number": 3}, {"number": 5}]


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), typer.Exit), (ValueError("out of memory"), ValueError)]
)
def test_what_is_complete_is_kept(
    tmp_path: Path, error: BaseException, raised: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, file = Ends([3, 5], measured), tmp_path / "r.json"
    benchmark.error = error
    with pytest.raises(raised):
        run(benchmark, output=file)
    data = json.loads(file.read_text())
    assert len(data["results"]) == 2
    assert data["is_interrupted"] == isinstance(error, KeyboardInterrupt)
    assert "sum 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), typer.Exit), (ValueError("no model"), ValueError)]
)
def test_an_end_before_any_result_writes_nothing(
    tmp_path: Path, error: BaseException, raised: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, file = Ends(), tmp_path / "r.json"
    benchmark.error = error
    file.write_text("earlier results")
    with pytest.raises(raised):
        run(benchmark, output=file)
    assert file.read_text() == "earlier results"
    is_reported = "interrupted before the first result; nothing is written" in capsys.readouterr().out
    assert is_reported == isinstance(error, KeyboardInterrupt)
