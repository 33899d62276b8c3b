"""What mkdocs adds: text from the code (docs/generators), pages of notebooks, pictures and sheets, formatted
quotes with a link to their file, sources, links to other projects.

A quote of a section is set in at most 88 columns, so that two fit beside each other, and is followed by a
link to its line. In twins, lines that the reference does not have are marked. Lines "(1) code" below a quote,
in its fence, annotate the line that contains this code; their texts are the numbered list below the fence. A
path of a Python file in backticks links to its source, one of a notebook to its page, one of a result file to
the file. Sources are pages
under source/: no page of them is in the navigation or in the search.
"""

import difflib
import json
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from ruff import find_ruff_bin

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs loads this file by its path

from docs.figures import five_requests, sheets
from docs.generators.definitions import definitions
from docs.generators.expand import expand
from docs.generators.notebook_pages import page_of
from docs.generators.record_notebooks import NOTEBOOKS

ROOT = Path(__file__).parents[1]
RUN = "course/run.html"
MAX_COLUMNS = 88

_GITHUB = "https://github.com"
_OTHERS = json.loads((ROOT / "docs/generators/others.json").read_text(encoding="utf-8"))
OTHERS = [
    *(
        (rf"{re.escape(name)} (issue|pull request) (\d+)", rf"[\g<0>]({_GITHUB}/{place}/issues/\2)")
        for name, place in _OTHERS["projects"].items()
    ),
    (r"`(python/sglang/[\w/.]+)`", rf"[`\1`]({_GITHUB}/sgl-project/sglang/tree/main/\1)"),
    (r"`(vllm/[\w/.]+)`", rf"[`\1`]({_GITHUB}/vllm-project/vllm/tree/main/\1)"),
    *(
        (rf"\*{re.escape(name)}\*", rf"[\g<0>](https://arxiv.org/abs/{number})")
        for name, number in _OTHERS["papers"].items()
    ),
]
"""What pages name of other projects, as a regular expression -> its link. GitHub leads from the issue of a
number to its pull request."""

_FENCE = re.compile(r"^ *(```|~~~)")
_QUOTE = re.compile(r'^( *)--8<-- "([^":]+\.py):?([^"]*)"$')
_NOTE = re.compile(r"^ *\((\d+)\) (.+)$")
_LISTED = re.compile(r"^ *\d+\. |^ +\S|^$")
_COMMENT = re.compile(r"^( *)(\S.*?)  (# .*)$")
_NAMED = re.compile(r"(?<!\[)`([\w/]+\.(?:py|ipynb))`(?!\])")
_QUOTED = re.compile(
    r"(<pre\b(?:(?!<pre\b).)*?</pre>)"
    r'((?:(?!<pre\b).)*?<a class="source"[^>]*>([^<,]+\.py), lines (\d+)-(\d+)<)',
    re.DOTALL,
)
_NAME = re.compile(r'(?<=<span class="n">)\w+(?=</span>)')
_RESULTS = re.compile(r"`docs/(measurements/data/([\w.-]+\.json))`")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of notebooks, and the source pages of all Python files that pages quote or name."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(_page(config, f"notebooks/{path.stem}.md", page_of(path, config.repo_url or "")))
    named: set[str] = set()
    for file in files.documentation_pages():
        for line in expand(file.content_string).splitlines():
            quote = _QUOTE.match(line)
            named.update(_NAMED.findall(line))
            if quote:
                places = definitions(quote.group(2), _section(*quote.group(2, 3))[0]).values()
                named.update([quote.group(2), *(place[0] for place in places if place is not None)])
    for name in sorted(named):
        if name.endswith(".py") and (ROOT / name).is_file():
            files.append(_page(config, _page_of(name), _source_page(name)))
    files.append(File.generated(config, RUN, content=five_requests.page("../source")))
    for name in [*sheets.numbers(), sheets.ALL]:
        files.append(File.generated(config, f"course/sheets/{name}.html", content=sheets.page(name)))
    return files


def _page(config: Any, place: str, text: str) -> File:
    return File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    if page.file.src_uri.startswith("source/"):
        return markdown
    lines: list[str] = []
    in_fence, in_twins, link, notes = False, False, "", 0
    for line in expand(markdown).splitlines():
        quote, note = _QUOTE.match(line), _NOTE.match(line)
        if link and not in_fence and not (notes and _LISTED.match(line) and not _FENCE.match(line)):
            lines += ["", link, ""]  # behind the list of annotations, which must follow the quote
            link, notes = "", 0
        if _FENCE.match(line):
            in_fence = not in_fence
            lines.append(line)
        elif link and in_fence and note:
            notes += 1
            lines[-1] = _annotated(lines[-1], notes, *note.groups())
        elif quote and in_fence:
            indent, path, label = quote.groups()
            new = new_lines(path, label) if in_twins else []
            if new:
                lines[-1] += f' {{hl_lines="{" ".join(map(str, new))}"}}'
            lines.append(textwrap.indent(_formatted(path, label), indent))
            numbers = _section(path, label)[0]
            url = _url(_page_of(path), page, files)
            assert url is not None, path
            first, last = numbers[0], numbers[-1]
            where = f"{path}, lines {first}-{last}"
            link = f'{indent}<a class="source" href="{url}#__codelineno-0-{first}">{where}</a>'
        elif in_fence or line.startswith("#"):
            repository: str | None = getattr(config, "repo_url", None)
            if in_fence and line.startswith("make run") and repository:
                lines.append(f"git clone {repository} && cd {repository.rstrip('/').rpartition('/')[2]}")
            lines.append(line)
        else:
            in_twins = line.startswith('<div class="twins"') or (in_twins and line != "</div>")
            line = linked(line)
            line = _RESULTS.sub(lambda match: _link_to_results(match, page, files), line)
            lines.append(_NAMED.sub(lambda match: _link(match.group(1), page, files), line))
    return "\n".join([*lines, "", link] if link else lines)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """The first use of each name in a quote leads to its definition."""

    def with_links(quote: re.Match[str]) -> str:
        code, behind, path, first, last = quote.groups()
        places = dict(definitions(path, range(int(first), int(last) + 1)))

        def with_link(match: re.Match[str]) -> str:
            place = places.pop(match.group(), None)
            url = None if place is None or "/toys/" in path else _url(_page_of(place[0]), page, files)
            if place is None or url is None:
                return match.group()
            return f'<a class="name" href="{url}#__codelineno-0-{place[1]}">{match.group()}</a>'

        return _NAME.sub(with_link, code) + behind

    return html if page.file.src_uri.startswith("source/") else _QUOTED.sub(with_links, html)


def linked(line: str) -> str:
    """Issues, paths and papers of other projects in a line of text, as links, where they are unambiguous."""
    for words, target in OTHERS:
        line = re.sub(rf"(?<![\[\w]){words}(?!\])", target, line)
    return line


def new_lines(path: str, label: str) -> list[int]:
    """Numbers of an optimized quote's lines that the reference's does not have."""
    twin = ROOT / path.replace("optimized/", "reference/", 1)
    is_twin = path.startswith("optimized/") and twin.is_file()
    if not is_twin or f"[start:{label}]" not in twin.read_text(encoding="utf-8"):
        return []
    own = _formatted(path, label).splitlines()
    other = _formatted(twin.relative_to(ROOT).as_posix(), label).splitlines()
    blocks = difflib.SequenceMatcher(None, own, other, autojunk=False).get_matching_blocks()
    same = {block.a + i for block in blocks for i in range(block.size)}
    return [i + 1 for i, line in enumerate(own) if i not in same and line.strip()]


def _annotated(text: str, number: int, written: str, code: str) -> str:
    """The quote with a marker of mkdocs-material at the end of the line that contains the code."""
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if code in line]
    if written != str(number) or len(found) != 1:
        raise PluginError(
            f"annotation ({written}) {code!r}: number {number}, in {len(found)} lines of the quote"
        )
    is_comment = re.search(r"(^|  )# ", lines[found[0]])
    lines[found[0]] += f" ({number})" if is_comment else f"  # ({number})!"
    return "\n".join(lines) + "\n"


def _page_of(path: str) -> str:
    return f"source/{path.removesuffix('.py')}.md" if path.endswith(".py") else path.replace(".ipynb", ".md")


def _url(place: str, page: Page, files: Files) -> str | None:
    file = files.get_file_from_path(place)
    return None if file is None else get_relative_url(file.url, page.url)


def _link(path: str, page: Page, files: Files) -> str:
    """In HTML, where Markdown would read the underscores of __init__ as bold."""
    url, name = _url(_page_of(path), page, files), path.replace("__", "&#95;&#95;")
    return f"`{path}`" if url is None else f'<a href="{url}"><code>{name}</code></a>'


def _link_to_results(match: re.Match[str], page: Page, files: Files) -> str:
    url = _url(match.group(1), page, files)
    if url is None:
        raise PluginError(f"{page.file.src_uri} names {match.group(1)}, which does not exist")
    return f'<a href="{url}"><code>{match.group(2)}</code></a>'


def _source_page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return (
        f'---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n~~~python linenums="1"\n{text}~~~\n'
    )


def _section(path: str, label: str) -> tuple[range, str]:
    """(numbers of its lines, text without markers); the whole file without a label."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    first, end = 0, len(lines)
    if label:
        marked = {i for i, line in enumerate(lines) if line.endswith((f"[start:{label}]", f"[end:{label}]"))}
        if len(marked) != 2:
            raise PluginError(f"{path} has no section {label!r}")
        first, end = min(marked) + 1, max(marked)
    text = "\n".join(line for line in lines[first:end] if "--8<--" not in line)
    return range(first + 1, end + 1), textwrap.dedent(text) + "\n"


def _formatted(path: str, label: str) -> str:
    text = _section(path, label)[1]
    if max(map(len, text.splitlines())) <= MAX_COLUMNS:
        return text
    # A comment behind a line that is too long goes above it: a formatter would break the line around it.
    lines = [_COMMENT.sub(r"\1\3\n\1\2", x) if len(x) > MAX_COLUMNS else x for x in text.splitlines()]
    formatted = _ruff_formatted("\n".join(lines) + "\n")
    return formatted.replace("\n\n\n", "\n\n")  # methods, which look like functions of a module here


@cache
def _ruff_formatted(code: str) -> str:
    command = [find_ruff_bin(), "format", "--line-length", str(MAX_COLUMNS), "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout
