"""Pages, docstrings, comments and messages use the field's words (docs/glossary.md), not private ones."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shared", "reference", "optimized", "tests", "docs", "notebooks")
LAB = ROOT / "docs" / "lab"  # a record: it keeps the words of its time

BANNED = {
    r"(some|no|any|every)body|anyone|whoever": "name the request, caller or component",
    r"wants": "needs, reads, requests",
    r"thrown out|throws? out|throwing out|gives? way": "retracted, preempted, evicted",
    r"(is|are|was|were|be|been|being) told": "gets, receives, is called for",
    r"lent|lends": "borrowed, borrows",
    r"steps? of prompts|prompt steps?": "prefill steps",
    r"one batch ahead": "overlap scheduling",
    r"rows? of nobody|ids? of no token": "padding rows, padding token ids",
    r"matrix products?|products? of matrices": "GEMM",
    r"longest gap|gaps between (the )?tokens": "max ITL, ITL",
    r"dealt out|deal(s|ing)? out": "distributed, scheduled",
    r"the host": "the CPU",
    r"news": "pending outputs, events",
    r"for the sake of": "for",
}
ALLOWED = (
    "tests/docs/test_words.py",
    "shared/tiny/small_talk.py",  # sentences of the training corpus
    "shared/tiny/words.py",
    "tests/conformance/mutants/optimized_draft_tree.py",  # quotes an identifier
)

_BANNED = [(re.compile(rf"\b({words})\b", re.IGNORECASE), instead) for words, instead in BANNED.items()]


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a page, or of the comments and strings of a source."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def found_in(line: str) -> list[str]:
    return [f"{match[0]!r}, use: {instead}" for words, instead in _BANNED if (match := words.search(line))]


def private_words(path: Path) -> list[str]:
    where = path.relative_to(ROOT).as_posix()
    return [f"{where}:{n}: {found}" for n, line in texts_of(path) for found in found_in(line)]


def files(suffix: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob(f"*{suffix}"))]
    if suffix == ".md":
        found.append(ROOT / "README.md")
    return [p for p in found if LAB not in p.parents and p.relative_to(ROOT).as_posix() not in ALLOWED]


@pytest.mark.parametrize("page", files(".md"), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert private_words(page) == []


def test_sources_use_the_words_of_the_field() -> None:
    """Comments, docstrings and other strings."""
    assert [found for path in files(".py") for found in private_words(path)] == []


def test_each_word_has_a_replacement_and_is_found() -> None:
    assert all(BANNED.values())
    assert found_in("a slot that nobody owns")
    assert not found_in("silently, newsletter, the hostname")
