"""Every stage of the course has the same parts: page, toy, notebook, skeleton, place in the navigation."""

import json
import re
from pathlib import Path

import pytest

from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "course"
HEADINGS = (
    "The problem, By hand, A toy version, Your turn, The reference, The optimized twin, Measured, "
    "Worked problems, Traps, What you can now say, Links"
)
NUM_PROBLEMS, NUM_SENTENCES = 5, 5
MAX_TOY_LINES = 35  # without blank ones

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)

each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.number)


def page_of(stage: Stage) -> str:
    return (COURSE / stage.page).read_text(encoding="utf-8")


def stem_of(stage: Stage) -> str:
    """Name of toy and notebook: 05_radix_cache."""
    return stage.page.removesuffix(".md").replace("-", "_")


def test_every_page_and_notebook_is_a_stage() -> None:
    pages = {stage.page for stage in STAGES}
    others = {"index.md", "commands.md", "labs.md", "run.md", "your-engine.md"}
    assert {path.name for path in COURSE.glob("*.md")} == pages | others
    assert {path.stem for path in (COURSE / "toys").glob("*.py")} == {stem_of(stage) for stage in STAGES}
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks == {stem_of(stage) for stage in STAGES} | {"00_first_tokens", "policy_gradient"}
    assert [stage.number for stage in STAGES] == sorted({stage.number for stage in STAGES})


def part_of(stage: Stage, heading: str) -> str:
    return page_of(stage).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@each_stage
def test_headings(stage: Stage) -> None:
    headings = re.findall(r"^## (.*)$", _FENCE.sub("", page_of(stage)), re.MULTILINE)
    assert ", ".join(headings) == HEADINGS


@each_stage
def test_tasks_come_between_the_text_and_before_their_solution(stage: Stage) -> None:
    """Each group has its command. Quotes that solve the exercise are folded, and so are answers."""
    command = rf'diptych course grade {stage.number} --group "?([^"\n#]*)'
    tasks = [name.strip() for name in re.findall(command, part_of(stage, "Your turn"))]
    assert tasks == [group.name for group in stage.groups]
    assert "<details" in part_of(stage, "The reference")
    assert "<details" in part_of(stage, "The optimized twin")
    problems = part_of(stage, "Worked problems")
    assert problems.count('??? success "Answer"') == NUM_PROBLEMS
    assert len(re.findall(r"^\d\. ", problems, re.MULTILINE)) == NUM_PROBLEMS
    assert len(re.findall(r"^\d\. ", part_of(stage, "What you can now say"), re.MULTILINE)) == NUM_SENTENCES


@each_stage
def test_length(stage: Stage) -> None:
    """The text counts without the annotations of quotes, which open on a click."""
    text = re.sub(r"^ *\d+\.  .*\n(?: {4,}\S.*\n)*", "", page_of(stage), flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert 600 <= len(text.split()) <= 2400


@each_stage
def test_page_names_its_parts(stage: Stage) -> None:
    page = page_of(stage)
    assert f'--8<-- "docs/course/toys/{stem_of(stage)}.py:' in page
    assert f"`notebooks/{stem_of(stage)}.ipynb`" in page
    assert re.search(rf"diptych course start engine && cd engine +# .*: {stage.skeleton}\n", page)
    assert f"\ndiptych course grade {stage.number}  " in page
    assert '<div class="twins" markdown>' in page
    assert f"]({stage.page})" in (COURSE / "index.md").read_text(encoding="utf-8")


@each_stage
def test_clauses_named_as_traps_exist(stage: Stage) -> None:
    from diptych.shared.tools.conformance.clauses import suite

    traps = page_of(stage).partition("## Traps")[2].partition("\n## ")[0]
    named = re.findall(r"`([^`]+)`", " ".join(re.findall(r"Clauses?: ([^.]*)\.", traps)))
    known = {clause.name for component in suite.CONTRACTS for clause in suite.clauses_of(component)}
    assert named
    assert set(named) <= known


@each_stage
def test_notebook_has_the_toy_of_the_page(stage: Stage) -> None:
    text = (COURSE / "toys" / f"{stem_of(stage)}.py").read_text(encoding="utf-8")
    toy = "".join(line for line in text.splitlines(keepends=True) if "--8<--" not in line)
    notebook = json.loads((ROOT / "notebooks" / f"{stem_of(stage)}.ipynb").read_text(encoding="utf-8"))
    assert toy.strip() in {"".join(cell["source"]) for cell in notebook["cells"]}
    assert sum(bool(line.strip()) for line in toy.splitlines()) <= MAX_TOY_LINES
    outside = re.sub(r"# --8<-- \[start:(.*)\]\n.*?# --8<-- \[end:\1\]\n", "", text, flags=re.DOTALL)
    assert outside.strip() == "", "the page does not quote this"
