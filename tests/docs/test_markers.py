"""Section markers, the comments by which pages quote code: each section is complete, short, and quoted.

In a source: "--8<-- [start:kebab-label]" and "--8<-- [end:kebab-label]" after a comment sign. In a page:
--8<-- "path/of/source.py:kebab-label". The snippets extension reads an unterminated section to the end of
the file and takes the first of two equal labels, without a warning.
"""

import re
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
from docs.hooks import MAX_COLUMNS, _formatted

ROOT = Path(__file__).parents[2]
MAX_LINES = 25
MAX_SECTIONS = 4
SOURCES = ("shared", "reference", "optimized", "docs/examples", "docs/course/toys")
ONE_PANEL = {  # section of the reference: why its twin does not have it
    "speculative/draft_tree.py:next-beams": "one kernel, optimized/kernels/draft/draft_beam_step.py",
    "speculative/draft_tree.py:choose-nodes": "one kernel, find-the-bound of draft_select.py",
    "speculative/draft_tree.py:link-tree": "one kernel, climb-to-the-root of draft_link.py",
    "speculative/draft_tree.py:accept-walk": "one kernel, ask-all-nodes of draft_accept.py",
    "models/qwen_next.py:gated-delta-net": "the same steps, in kernels",
    "models/qwen_next.py:gated-attention": "the same steps over one GEMM",
    "linear_attention.py:convolve": "a kernel, optimized/kernels/recurrence/convolve.py",
    "linear_attention.py:delta-rule": "a kernel, optimized/kernels/recurrence/delta_tokens.py",
}

_MARKER = re.compile(r"# --8<-- \[(start|end):([a-z0-9-]+)\]$", re.MULTILINE)
_QUOTE = re.compile(r'^\s*--8<-- "([^":]+\.py)(?::([^"]+))?"', re.MULTILINE)


def labels_of(path: str, text: str) -> list[str]:
    """The labels of a source. Every start has an end behind it, no label is there twice, none is of another
    form, and they are few."""
    markers = _MARKER.findall(text)
    labels = [label for kind, label in markers if kind == "start"]
    assert len(markers) == text.count("--8<-- ["), f"{path}: a marker of another form"
    assert len(set(labels)) == len(labels) <= MAX_SECTIONS, path
    assert sorted(labels) == sorted(label for kind, label in markers if kind == "end"), path
    assert all(markers.index(("start", label)) < markers.index(("end", label)) for label in labels), path
    return labels


@cache
def sections() -> set[str]:
    sources = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sources}
    return {f"{path}:{label}" for path, text in named.items() for label in labels_of(path, text)}


def test_all_sections_are_quoted_and_all_quotes_are_sections() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert {f"{path}:{label}" for page in pages for path, label in _QUOTE.findall(page)} == sections()


def test_twins_have_the_same_sections() -> None:
    alone = set()
    for section in sections():
        panel, _, rest = section.partition("/")
        twin = {"reference": "optimized", "optimized": "reference"}.get(panel)
        has_twin = twin is not None and (ROOT / twin / rest.partition(":")[0]).is_file()
        if has_twin and f"{twin}/{rest}" not in sections():
            alone.add(section)
    assert alone == {f"reference/{section}" for section in ONE_PANEL}


def test_sections_fit_on_the_screen() -> None:
    """As the site sets them: in at most 88 columns."""
    wrong = []
    for section in sorted(sections()):
        lines = _formatted(*section.split(":")).rstrip().splitlines()
        wrong += [f"{section}: {line}" for line in lines if len(line) > MAX_COLUMNS]
        wrong += [] if 1 <= len(lines) <= MAX_LINES else [f"{section} has {len(lines)} lines"]
    assert wrong == []


@pytest.mark.parametrize("text", ["[start:a]", "[end:a]", "[end:a] [start:a]", "[start:A] [end:A]"])
def test_wrong_markers_are_found(text: str) -> None:
    with pytest.raises(AssertionError):
        labels_of("", "\n".join(f"# --8<-- {marker}" for marker in text.split()))
