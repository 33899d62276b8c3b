"""Form of every page: one title, headings in order, a first sentence, texts for pictures, correct spelling.

`mkdocs build --strict` checks links between pages, and their anchors; here are the links of the README.
"""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
QUOTE = DOCS / "changelog.md"  # all of CHANGELOG.md
PAGES = sorted([*({*DOCS.rglob("*.md")} - {QUOTE}), ROOT / "README.md", ROOT / "CHANGELOG.md"])

_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)


def text_of(page: Path) -> str:
    """Without front matter and code."""
    return _FENCE.sub("", _HEADER.sub("", page.read_text(encoding="utf-8"))).strip()


def wrong_headings(text: str) -> list[str]:
    levels = [(len(marks), title) for marks, title in re.findall(r"^(#+) (.*)$", text, re.MULTILINE)]
    wrong = [title for (above, _), (level, title) in itertools.pairwise(levels) if level > above + 1]
    wrong += [title for level, title in levels[1:] if level == 1]
    return wrong if levels and levels[0][0] == 1 else ["no title", *wrong]


def pictures_without_text(text: str) -> list[str]:
    images = [image for image in re.findall(r"<img\b[^>]*>", text) if not re.search(r'\balt="[^"]+"', image)]
    drawings = [
        svg[:80] for svg in _SVG.findall(text) if not re.search(r"<title>|aria-label=|aria-hidden=", svg)
    ]
    return re.findall(r"!\[\s*\]\([^)]*\)", text) + images + drawings


def problems_of(page: Path) -> list[str]:
    text = text_of(page)
    found = wrong_headings(text) + pictures_without_text(text)
    # Under the title, before the first heading, or as the description of the front matter.
    opening = re.split(r"^#+ .*$", text, flags=re.MULTILINE)[1].strip()
    is_read = page.parent.name != "lab"  # the record
    if (
        is_read
        and not re.search(r"\w+ \w+[^#]*[.:]", opening)
        and "\ndescription:" not in page.read_text("utf-8")
    ):
        found.append("no sentence says what the page is about")
    return found


def test_titles_headings_first_sentences_and_texts_for_pictures() -> None:
    assert {page.name: problems for page in PAGES if (problems := problems_of(page))} == {}


def test_drawings_have_a_title() -> None:
    """SVG files too, since a page may include them."""
    drawings = [path for path in DOCS.rglob("*.svg") if DOCS / "lab" not in path.parents]
    untitled = [path.name for path in drawings if pictures_without_text(path.read_text(encoding="utf-8"))]
    assert untitled == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_a_page_at_the_root_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


MACHINERY = ("generators", "figures", "stylesheets", "javascripts", "../tests/docs")
MAX_MACHINERY = 6389
"""Lines: as many as when it was set. docs/lab/course.md has the count by part, and what was tried."""


def test_the_code_that_makes_these_pages_does_not_grow() -> None:
    files = [path for folder in MACHINERY for path in (DOCS / folder).rglob("*.*")] + [DOCS / "hooks.py"]
    counted = [path for path in files if path.suffix in (".py", ".css", ".js")]
    num_lines = sum(
        path.read_text("utf-8").count("\n")
        for path in counted
        if not {"solutions", "wrong_ideas"} & {*path.parts}
    )
    assert num_lines <= MAX_MACHINERY, "shorten something, or say in docs/lab/course.md why not"


def test_spelling() -> None:
    """codespell, with the settings of pyproject.toml."""
    folders = ["docs", "notebooks", "shared", "reference", "optimized", "tests"]
    command = [sys.executable, "-m", "codespell_lib", *folders, "README.md", "mkdocs.yml"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
