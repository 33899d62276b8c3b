"""Each optimization has a short page of measurements of one shape, and the results page leads to it."""

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from docs.generators import measured, record_measurements
from docs.generators.expand import expand
from docs.generators.tables import cells_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "measurements"
HEADINGS = ["Idea", "Before and after", "When it loses", "Command"]
MAX_WORDS = 500
OTHERS = ("index.md", "steps.md", "serving.md")  # measurements of the whole, not of an optimization
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name not in OTHERS)
TYPED = re.compile(r"^\|.*\|\s*\**\d[\d,.]*( %)?\**( \(.*\))?\s*\|", re.MULTILINE)
CELL = re.compile(r"(?<=\|) *\**(\d[\d,]*(?:\.\d+)?)\**(?: %)? *(?=\|)")
RECORDED = "*Recorded by hand"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_idea_figures_limits_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    num_topics = text.partition("## Idea")[2].partition("\n## ")[0].count("\n### ")
    words = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split()
    assert len(words) <= MAX_WORDS * max(num_topics, 1)
    figures = text.partition("## Before and after")[2].partition("\n## ")[0]
    assert "\n|" in figures or "\n<!-- generate: measured " in figures
    assert re.search(r"```bash\n(diptych|python) ", expand(text.partition("## Command")[2]))
    assert f"]({page.name})" in (FOLDER / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_tables_of_numbers_have_a_source(page: Path) -> None:
    """A table comes from a result file (`generate: measured`), or a line below it says where it is from."""
    unsourced = []
    for block in re.split(r"\n{2,}", page.read_text(encoding="utf-8")):
        if TYPED.search(block):
            unsourced.append(block.splitlines()[0])
        elif block.startswith(RECORDED) and unsourced:
            unsourced.pop()
    assert unsourced == []


def test_headings_of_a_table_are_distinct() -> None:
    """Charts read tables by their headings."""
    heads = [notes["head"].split(" | ") for notes in measured.definitions().values()]
    assert len(heads) > 30
    assert [head for head in heads if len(set(head)) < len(head)] == []


def test_the_table_of_the_readme_is_recorded() -> None:
    """README.md is not expanded, so its table is typed: the rows of `offline` and `latency` side by side."""
    offline, latency = (rows_of(measured.measured(name)) for name in ("offline", "latency"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (typed,) = (block for block in readme.split("\n\n") if block.startswith("| model shape |"))
    expected = [[*left, *right[1:]] for left, right in zip(offline[2:], latency[2:], strict=True)]
    assert rows_of(typed)[2:] == expected


def rows_of(text: str) -> list[list[str]]:
    return [cells_of(line) for line in text.splitlines() if line.startswith("|")]


def test_numbers_of_the_course_are_recorded() -> None:
    """A number in a table of a stage is one of its notebook (source or recorded output) or of a measurement
    page, or a line below the table says where it is from."""
    pages = [expand(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.md")]
    unknown = []
    for page in sorted((ROOT / "docs" / "course").glob("[0-9]*.md")):
        name = page.stem.replace("-", "_")
        known = numbers("\n".join([*pages, *texts_of(name)]))
        blocks = re.split(r"\n{2,}", page.read_text(encoding="utf-8"))
        for block, below in pairwise([*blocks, ""]):
            if block.startswith("|") and not below.startswith(RECORDED):
                typed = [cell[1] for line in block.splitlines() for cell in CELL.finditer(line)]
                unknown += [f"{page.name}: {text}" for text in typed if not is_known(text, known)]
    assert unknown == []


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"(?<![\w.])\d[\d,_]*(?:\.\d+)?(?!\w)", text)]


def texts_of(notebook: str) -> list[str]:
    """The sources of its cells and their recorded outputs."""
    places = (ROOT / "notebooks" / f"{notebook}.ipynb", ROOT / "docs/samples/notebooks" / f"{notebook}.json")
    cells, record = (json.loads(path.read_text(encoding="utf-8")) for path in places)
    sources = ["".join(cell["source"]) for cell in cells["cells"] if cell["cell_type"] == "code"]
    return sources + [str(output) for cell in record for output in cell["outputs"]]


def is_known(text: str, known: list[float]) -> bool:
    """Whether it is one of these numbers, rounded."""
    digits = len(text.partition(".")[2])
    return any(round(each, digits) == float(text.replace(",", "")) for each in known)


def test_every_result_file_has_its_command() -> None:
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in measured.DATA.glob("*.json")}
    without = {name for name, report in results.items() if "command" not in report}
    others = {"overlap", "long-prompt"}  # docs/figures/record_timelines.py; docs/works.md: runs of tests
    assert {name for name in without if not name.startswith("gpu-tests-")} == others


def test_a_command_is_recorded_in_its_file(tmp_path: Path) -> None:
    command = """python -c 'import sys; open(sys.argv[1], "w").write("{}")'"""
    record_measurements.main(tmp_path, [f"good={command}"])
    assert json.loads((tmp_path / "good.json").read_text("utf-8")) == {"command": command}
    with pytest.raises(subprocess.CalledProcessError):
        record_measurements.main(tmp_path, ["wrong=python -c 'raise SystemExit(3)'"])


def test_entries_of_all_results_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [{"model": "a", "tp": 1, "seed": 0, "x": 1}, {"model": "b", "tp": 1, "seed": 0, "x": True}]
    report = {"command": "x", "results": [{"flags": each, "step_s": i} for i, each in enumerate(flags)]}
    text = record_measurements.text_of(report)
    assert text.count('"tp"') == text.count('"seed"') == 1
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(measured, "DATA", tmp_path)
    assert json.dumps(measured.load("x"), sort_keys=True) == json.dumps(report, sort_keys=True)


def test_usual_entries_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key must have all usual ones. Some may differ, others be new."""
    usual = measured.usual()
    machine, flags = usual["machine"], usual["flags"]
    of_one = [flags | {"model": "a", "tp": 2}, flags | {"model": "b", "seed": True}]
    assert "seed" not in flags
    report = {
        "versions": {"torch": usual["versions"]["torch"]},  # without the others
        "machine": machine | {"num_cpus": 7},
        "results": [{"flags": each, "step_s": i} for i, each in enumerate(of_one)],
    }
    text = record_measurements.text_of(report)
    assert json.loads(text)["machine"] == {"num_cpus": 7}
    assert [each["flags"] for each in json.loads(text)["results"]] == [
        {"model": "a", "tp": 2},
        {"model": "b", "seed": True},
    ]
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(measured, "DATA", tmp_path)
    assert json.dumps(measured.load("x"), sort_keys=True) == json.dumps(report, sort_keys=True)


def test_the_lab_notes_are_named_in_one_place() -> None:
    """They are a record, and not on the site: no other page sends a reader there."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "lab"]
    linking = [page.relative_to(ROOT).as_posix() for page in pages if "lab/" in links_of(page)]
    assert linking == []
    assert "`docs/lab/`" in (ROOT / "docs/measurements/index.md").read_text(encoding="utf-8")


def links_of(page: Path) -> str:
    return " ".join(re.findall(r"\]\(([^)]*)\)", page.read_text(encoding="utf-8")))
