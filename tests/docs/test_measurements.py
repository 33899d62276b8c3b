"""Each optimization has a short page of measurements of one shape, and the results page leads to it."""

import hashlib
import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from docs.generators import measured, record_measurements
from docs.generators.expand import expand
from docs.generators.notebook_pages import page_of
from docs.generators.record_notebooks import NOTEBOOKS
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
        notebook = page_of(NOTEBOOKS / f"{page.stem.replace('-', '_')}.ipynb")
        known = numbers("\n".join([*pages, *notebook.split("~~~")[1::2]]))
        blocks = re.split(r"\n{2,}", page.read_text(encoding="utf-8"))
        for block, below in pairwise([*blocks, ""]):
            if block.startswith("|") and not below.startswith(RECORDED):
                typed = [cell[1] for line in block.splitlines() for cell in CELL.finditer(line)]
                unknown += [f"{page.name}: {text}" for text in typed if not is_known(text, known)]
    assert unknown == []


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"(?<![\w.])\d[\d,_]*(?:\.\d+)?(?!\w)", text)]


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


def test_the_usual_entries_stay_as_they_are() -> None:
    """Every file that has `COMMON` reads them: a change would be one of what was recorded."""
    digest = hashlib.sha256(measured.USUAL.read_bytes()).hexdigest()
    assert digest == "e9460bb32c1cb14b2310100476574dda9755643ab173afaa7c78d392ff853cf5"


def test_entries_in_common_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual ones in usual.json, where a key has all of them. Some may differ, others be new."""
    usual = json.loads(measured.USUAL.read_text(encoding="utf-8"))
    flags = [{"tp": 2, "seed": 0, "x": 1, "ep": 1}, {"tp": True, "seed": 0, "x": True, "ep": True}]
    report = {
        "versions": {"torch": usual["versions"]["torch"]},  # without the others
        "machine": usual["machine"] | {"num_cpus": 7},
        "results": [{"flags": usual["flags"] | each, "step_s": i} for i, each in enumerate(flags)],
    }
    assert {"tp": 1, "ep": 1}.items() <= usual["flags"].items()
    text = record_measurements.text_of(report)
    assert [text.count(f'"{name}"') for name in ("torch", "cpu", "seed", "tp", "x", "ep")] == [
        1,
        0,
        1,
        2,
        2,
        1,
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
