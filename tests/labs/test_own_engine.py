"""`diptych course engine` and `leaderboard`: parts of a folder, a report with page and badge, the ranking."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.shared import registry
from diptych.shared.tools.cli import app
from diptych.shared.tools.commands.course_engine import own_reports, read_report
from diptych.shared.tools.conformance.clauses.stages import STAGES, stage_of
from diptych.shared.tools.course.engine_page import badge, engine_page, leaderboard_page, ranked
from diptych.shared.tools.course.engine_speed import flags_of_engines
from diptych.shared.tools.course.folder import CourseFolder
from diptych.shared.tools.course.own_engine import Part, Report, SoakResult, use_of, write_use
from tests.labs.record_engines import ENGINES, text_of


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["course", *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    """A learner with the skeletons, and solutions of stages 04 and 12."""
    learner, _ = CourseFolder.start(tmp_path / "mine")
    for number in ("04", "12"):
        stage = stage_of(number)
        learner.file_of(stage).write_text(text_of(stage), "utf-8")
    return learner


def report(name: str, held: int = 10, failure: str = "", speed: float = 100.0) -> Report:
    failing = ("split-keeps-the-holder",) * (10 - held)
    parts = (
        Part("05", "the radix cache", "radix_cache", "my_cache.py", "used", 10, held, failing),
        Part("06", "sampling", "sampler", "my_sampler.py", "open", 10),
    )
    speeds = {"yours": speed, "reference": 100.0, "optimized": 150.0}
    return Report(name, parts, SoakResult(40, 900, failure), speeds, "2 CPU cores", date="2026-11-28")


def test_written_parts_are_used(folder: CourseFolder) -> None:
    use = use_of(folder)
    assert set(use) == {"prefill_adder", "detokenizer"}
    write_use(folder)
    assert registry.parse_use(f"@{folder.path / 'engine.use'}") == use
    assert flags_of_engines(use)["yours"] == {"panel": "reference", "use": use}


def test_parts_whose_packages_are_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diptych.optimized.memory_pool", None)  # as where there is no Triton
    assert "memory_pool" not in registry.optimized_without_gpu()
    assert "radix_cache" in registry.optimized_without_gpu()


def test_a_later_stage_replaces_an_earlier_one_of_its_component(folder: CourseFolder) -> None:
    for number in ("03", "09"):
        stage = stage_of(number)
        folder.file_of(stage).write_text(text_of(stage), "utf-8")
    assert use_of(folder)["scheduler"].endswith("my_overlap.py:MyScheduler")


@pytest.mark.full
def test_an_engine_is_graded(folder: CourseFolder) -> None:
    arguments = ["engine", "--folder", str(folder.path), "--name", "mine", "--seconds", "1"]
    text = run(*arguments)
    graded = read_report(folder.path)
    assert [part.state for part in graded.parts].count("used") == 2
    assert all(part.num_held == part.num_clauses for part in graded.parts if part.state == "used")
    assert graded.soak.failure == ""
    assert graded.soak.num_answers > 0
    assert min(graded.tokens_per_s.values()) > 0
    assert "no failure" in text
    assert "mine" in (folder.path / "engine.html").read_text("utf-8")
    assert "1  mine" not in text
    assert "mine" in run("leaderboard", str(folder.path))


@pytest.mark.full
def test_a_defect_is_found(folder: CourseFolder) -> None:
    stage = stage_of("06")
    folder.file_of(stage).write_text(text_of(stage, ENGINES["almost"]["06"]), "utf-8")
    text = run("engine", "--folder", str(folder.path), "--seconds", "1", status=1)
    assert "filters-keep" in " ".join(text.split())
    part = next(part for part in read_report(folder.path).parts if part.stage == "06")
    assert 0 < len(part.failing) < part.num_clauses


def test_ranking() -> None:
    best, slow, wrong, broken = (
        report("best", speed=120.0), report("slow", speed=20.0), report("wrong", held=9, speed=150.0),
        report("broken", failure="round 0: AssertionError", speed=150.0),
    )  # fmt: skip
    assert ranked([broken, wrong, slow, best]) == [best, slow, wrong, broken]


def test_pages_and_badge() -> None:
    page = engine_page(report("<swift>", held=9))
    assert "&lt;swift&gt;" in page
    assert "split-keeps-the-holder" in page
    assert "45.0 %" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(badge(report("swift")))
    assert root.attrib["height"] == "20"
    assert "1.00x" in "".join(root.itertext())
    assert "soak failed" in badge(report("swift", failure="round 3"))
    board = leaderboard_page([report("a"), report("b", failure="round 3: wrong text")])
    assert board.index(">a<") < board.index(">b<")
    assert "wrong text" in board


def test_the_engines_of_the_project_are_of_three_qualities() -> None:
    swift, plodder, almost = own_reports()
    assert [swift.name, plodder.name, almost.name] == list(ENGINES)
    assert swift.num_used == plodder.num_used == almost.num_used == len(STAGES)
    assert swift.share == plodder.share == 1 > almost.share
    assert not swift.soak.failure
    assert not plodder.soak.failure
    assert plodder.speed < swift.speed
    assert ranked([almost, plodder, swift]) == [swift, plodder, almost]
    assert all(each.author == "Diptych" for each in (swift, plodder, almost))


def test_leaderboard(tmp_path: Path) -> None:
    mine = replace(report("mine"), author="me")
    (tmp_path / "engine.json").write_text(json.dumps(mine.as_json()))
    assert read_report(tmp_path) == mine
    text = run("leaderboard", str(tmp_path), "--html", str(tmp_path / "board.html"))
    assert all(name in text for name in ("mine", *ENGINES))
    assert "mine" in (tmp_path / "board.html").read_text("utf-8")
    assert "swift" not in run("leaderboard", str(tmp_path), "--no-ours")


def test_errors_are_one_line(tmp_path: Path) -> None:
    assert "run `diptych course engine" in run("leaderboard", str(tmp_path), status=2)
    (tmp_path / "engine.json").write_text("{}")
    assert "is damaged" in run("leaderboard", str(tmp_path), status=2)
    CourseFolder.start(tmp_path)
    assert "no part is written" in run("engine", "--folder", str(tmp_path), status=2)
