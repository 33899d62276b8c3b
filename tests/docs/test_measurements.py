"""Each optimization has a short page of measurements of one shape, and the results page leads to it."""

import re
from pathlib import Path

import pytest

from docs.generators import hook

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "measurements"
HEADINGS = ["Idea", "Before and after", "When it loses", "Command"]
MAX_WORDS = 500
OTHERS = ("index.md", "steps.md", "serving.md")  # measurements of the whole, not of an optimization
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name not in OTHERS)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_idea_figures_limits_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert len(text.split()) <= MAX_WORDS
    assert "\n|" in hook.expand(text.partition("## Before and after")[2].partition("\n## ")[0])
    assert "```bash\ndiptych " in text.partition("## Command")[2]


@each_page
def test_page_is_linked_and_in_the_navigation(page: Path) -> None:
    assert f"]({page.name})" in (FOLDER / "index.md").read_text(encoding="utf-8")
    assert f"measurements/{page.name}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_lab_notes_are_linked_from_one_place() -> None:
    """They are a record: no other page sends a reader there."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "lab"]
    linking = [page.relative_to(ROOT).as_posix() for page in pages if "lab/" in links_of(page)]
    assert linking == ["docs/measurements/index.md"]


def links_of(page: Path) -> str:
    return " ".join(re.findall(r"\]\(([^)]*)\)", page.read_text(encoding="utf-8")))
