"""The section markers of this repository are correct, and the lint finds each kind of error."""

from pathlib import Path

import pytest
from marker_lint import MAX_LINES, ROOT, lint, quotes_of, sections_of


def test_all_section_markers_are_correct() -> None:
    assert lint() == []


def test_quotes_fit_on_the_screen() -> None:
    """As the site sets them: in at most 88 columns."""
    pytest.importorskip("mkdocs")
    from docs.hooks import MAX_COLUMNS, _formatted

    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    quotes = {(path, label) for page in pages for _, path, label in quotes_of(page) if path.endswith(".py")}
    assert len(quotes) > 50
    wrong = []
    for path, label in sorted(quotes):
        lines = _formatted(path, label).rstrip().splitlines()
        wrong += [f"{path}:{label}: {line}" for line in lines if len(line) > MAX_COLUMNS]
        if len(lines) > MAX_LINES:
            wrong.append(
                f"{path}:{label} has {len(lines)} lines in {MAX_COLUMNS} columns, not 1 to {MAX_LINES}"
            )
    assert wrong == []


def make_project(root: Path, source: str, page: str) -> Path:
    (root / "reference").mkdir()
    (root / "docs").mkdir()
    (root / "reference" / "a.py").write_text(source)
    (root / "docs" / "page.md").write_text(page)
    return root


GOOD_SOURCE = "# --8<-- [start:one-idea]\nx = 1\n# --8<-- [end:one-idea]\n"
GOOD_PAGE = '```python\n--8<-- "reference/a.py:one-idea"\n```\n'


def test_lint_accepts_a_quoted_section(tmp_path: Path) -> None:
    assert lint(make_project(tmp_path, GOOD_SOURCE, GOOD_PAGE), {}) == []


@pytest.mark.parametrize(
    ("source", "page", "complaint"),
    [
        ("# --8<-- [start:one-idea]\nx = 1\n", GOOD_PAGE, "never ended"),
        ("x = 1\n# --8<-- [end:one-idea]\n", "", "ends without a start"),
        (GOOD_SOURCE + GOOD_SOURCE, GOOD_PAGE, "started twice"),
        (GOOD_SOURCE.replace("one-idea", "One_Idea"), "", "no kebab-case"),
        (GOOD_SOURCE, "", "no page quotes"),
        (GOOD_SOURCE, GOOD_PAGE.replace("one-idea", "other"), "has no section 'other'"),
        (GOOD_SOURCE, GOOD_PAGE.replace("a.py", "b.py"), "reference/b.py has no section"),
        (GOOD_SOURCE, '--8<-- "reference/a.py"\n' + GOOD_PAGE, "quotes all of"),
        (GOOD_SOURCE.replace("x = 1\n", "x = 1\n" * 26), GOOD_PAGE, "26 lines"),
        (GOOD_SOURCE.replace("x = 1\n", ""), GOOD_PAGE, "0 lines"),
        (GOOD_SOURCE.replace("[end:", "[End:"), GOOD_PAGE, "no section marker"),
    ],
)
def test_lint_finds(tmp_path: Path, source: str, page: str, complaint: str) -> None:
    errors = lint(make_project(tmp_path, source, page), {})
    assert any(complaint in error for error in errors), errors


def test_lint_limits_the_number_of_sections_in_a_file() -> None:
    source = "".join(GOOD_SOURCE.replace("one-idea", f"idea-{i}") for i in range(5))
    assert any("5 sections" in error for error in sections_of("a.py", source)[1])


def test_lint_compares_the_labels_of_twins(tmp_path: Path) -> None:
    root = make_project(tmp_path, GOOD_SOURCE, GOOD_PAGE)
    twin = root / "optimized" / "a.py"
    twin.parent.mkdir()
    twin.write_text("x = 2\n")
    assert lint(root, {}) == ["reference/a.py: section 'one-idea' is missing in optimized/a.py"]
    listed = {("reference/a.py", "one-idea"): "a loop that the twin does not have"}
    assert lint(root, listed) == []
    twin.write_text(GOOD_SOURCE)
    (root / "docs" / "page.md").write_text(GOOD_PAGE + GOOD_PAGE.replace("reference", "optimized"))
    assert lint(root, {}) == []
    assert any("or its twin has it too" in error for error in lint(root, listed))
