"""docs/hooks.py: quotes of at most 88 columns with a link to their file, labels of table cells."""

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mkdocs")
from docs import hooks
from docs.generators import definitions

ROOT = Path(__file__).parents[2]


def test_formatting_changes_no_more_than_the_layout() -> None:
    text, quote = hooks._section("reference/radix_cache.py", "radix-split")[1], hooks._formatted
    assert _tokens(text) == _tokens(quote("reference/radix_cache.py", "radix-split"))


def _tokens(code: str) -> str:
    return "".join(code.split()).replace(",)", ")")


def test_a_comment_behind_a_long_line_goes_above_it() -> None:
    quote = hooks._formatted("reference/memory_pool.py", "alloc-extend")
    assert re.search(r"^( *)# of the page .*\n\1page_end = \S", quote, re.MULTILINE)
    assert not re.search(r"^ *[)\]}]+.*  # ", quote, re.MULTILINE)


class _Files:
    def get_file_from_path(self, path: str) -> Any:
        source = (ROOT / path.removeprefix("source/")).with_suffix(".py")
        exists = source.is_file() or (ROOT / path).with_suffix(".ipynb").is_file()
        return SimpleNamespace(url=path.removesuffix(".md") + "/") if exists else None


def _shown(markdown: str, repository: str = "") -> str:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="course/05-radix-cache.md"), url="course/05/")
    files: Any = _Files()
    config = SimpleNamespace(repo_url=repository)
    return hooks.on_page_markdown(textwrap.dedent(markdown), page, config, files)


def test_a_public_address_gives_the_line_that_clones() -> None:
    page = "```bash\nmake run\n```\n"
    assert _shown(page) == page.rstrip()
    shown = _shown(page, "https://example.org/x/diptych")
    assert "git clone https://example.org/x/diptych && cd diptych\nmake run" in shown


def test_a_quote_is_followed_by_a_link_to_its_line() -> None:
    shown = _shown("""\
        === "reference"

            ```python
            --8<-- "reference/radix_cache.py:radix-split"
            ```
        """)
    lines = (ROOT / "reference/radix_cache.py").read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, start=1) if "[start:radix-split]" in text) + 1
    link = f'    <a class="source" href="../../source/reference/radix_cache/#__codelineno-0-{line}">'
    assert link in shown
    assert "    def _split" in shown
    assert "--8<--" not in shown


def test_lines_that_the_reference_does_not_have_are_marked_in_twins() -> None:
    marked = hooks.new_lines("optimized/radix_cache.py", "radix-evict")
    lines = hooks._formatted("optimized/radix_cache.py", "radix-evict").splitlines()
    assert any("self.heap" in lines[number - 1] for number in marked)
    assert not any("return num_evicted" in lines[number - 1] for number in marked)
    assert hooks.new_lines("reference/radix_cache.py", "radix-evict") == []
    quote = '```python\n--8<-- "optimized/radix_cache.py:radix-evict"\n```'
    assert 'hl_lines="' in _shown(f'<div class="twins" markdown>\n\n{quote}\n\n</div>')
    assert 'hl_lines="' not in _shown(quote)


COURSE = sorted((ROOT / "docs" / "course").glob("[0-9]*.md"))
SOME = [pytest.param(p, id=p.stem, marks=[pytest.mark.full] * (i % 5 != 2)) for i, p in enumerate(COURSE)]
ANNOTATED = """\
    ```python
    --8<-- "reference/radix_cache.py:radix-split"
    (1) upper.lock_ref = child.lock_ref
    (2) return upper
    ```

    1.  Running requests keep both halves.
    2.  The caller
        goes on here.

    What follows.
"""


def test_annotations_mark_lines_and_their_list_follows_the_quote() -> None:
    lines = _shown(ANNOTATED).splitlines()
    assert "    upper.lock_ref = child.lock_ref  # (1)!" in lines
    assert "    return upper  # (2)!" in lines
    assert lines.index("```") < lines.index("1.  Running requests keep both halves.")
    link = next(i for i, line in enumerate(lines) if line.startswith('<a class="source"'))
    assert lines.index("    goes on here.") < link < lines.index("What follows.")


@pytest.mark.parametrize("wrong", ["(2) return upper", "(1) upper", "(1) no such code"])
def test_an_annotation_of_no_line_or_of_several_ends_the_build(wrong: str) -> None:
    with pytest.raises(Exception, match="lines of the quote"):
        _shown(ANNOTATED.replace("(1) upper.lock_ref = child.lock_ref", wrong))


@pytest.mark.parametrize("page", COURSE, ids=lambda page: page.stem)
def test_each_annotation_has_its_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fences = re.findall(
        r"((?:^ *\(\d+\) .*\n)+) *```\n\n((?: *\d+\. .*\n(?: +\S.*\n)*)+)", text, re.MULTILINE
    )
    assert len(fences) >= 2
    for notes, texts in fences:
        numbers = re.findall(r"^ *\((\d+)\)", notes, re.MULTILINE)
        assert numbers == re.findall(r"^ *(\d+)\. ", texts, re.MULTILINE)
    assert sum(notes.count("\n") for notes, _ in fences) == len(
        re.findall(r"^ *\(\d+\) ", text, re.MULTILINE)
    )


def test_a_path_links_to_its_source() -> None:
    shown = _shown("`reference/scheduler.py` and `reference/none.py`\n\n```\n`reference/scheduler.py`\n```")
    assert shown.count("<a ") == 1
    assert '<a href="../../source/reference/scheduler/"><code>reference/scheduler.py</code></a>' in shown
    assert "`reference/none.py`" in shown
    notebook = "notebooks/05_radix_cache"
    link = f'<a href="../../{notebook}/"><code>{notebook}.ipynb</code></a>'
    assert _shown(f"`{notebook}.ipynb`, `notebooks/none.ipynb`") == f"{link}, `notebooks/none.ipynb`"


def names_in(path: str, label: str) -> dict[str, definitions.Place | None]:
    return definitions.definitions(path, hooks._section(path, label)[0])


def test_a_name_leads_to_its_definition() -> None:
    path = "reference/scheduler.py"
    found = names_in(path, "get-next-batch")
    for name, file in {
        "ScheduleBatch": "shared/types/batch.py",  # through __init__
        "get_batch_decode": path,
        "running": "shared/scheduling/lifecycle.py",
        "enable_mixed_chunk": "shared/flags/engine_flags.py",
    }.items():
        where, line = found[name] or ("", 0)
        assert (where, name in (ROOT / where).read_text("utf-8").splitlines()[line - 1]) == (file, True)
    assert {found[name] for name in ("self", "prefill", "decodable")} == {None}


@pytest.mark.parametrize("page", SOME)
def test_every_name_of_a_quote_has_its_place(page: Path) -> None:
    """In the quote, the project, or another package; docs/generators/names.json has what jedi misses."""
    quotes = filter(None, map(hooks._QUOTE.match, page.read_text(encoding="utf-8").splitlines()))
    places = {(path, name): place for _, path, label in (quote.groups() for quote in quotes)
              for name, place in names_in(path, label).items()}  # fmt: skip
    assert len(places) > 30
    assert [key for key, place in places.items() if place == definitions.UNKNOWN] == []


def test_other_projects_are_links() -> None:
    shown = hooks.linked(
        "SGLang issue 38941, vLLM pull request 43869 in `vllm/v1/core/`. Lin et al., *AWQ*, 2024"
    )
    for link in (
        "[SGLang issue 38941](https://github.com/sgl-project/sglang/issues/38941)",
        "[vLLM pull request 43869](https://github.com/vllm-project/vllm/issues/43869)",
        "[`vllm/v1/core/`](https://github.com/vllm-project/vllm/tree/main/vllm/v1/core/)",
        "[*AWQ*](https://arxiv.org/abs/2306.00978)",
    ):
        assert link in shown
    once = "[vLLM issue 1](https://x) and mini-sglang issue 3"
    assert hooks.linked(once).count("](https://") == 2
