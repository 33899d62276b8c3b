"""Printable sheets of the stages, one A4 page each: python -m docs.figures.sheets [FOLDER].

A sheet is made of its stage's page (first paragraph, a block of "By hand", the picture, the table of shapes)
and of sheets.yml (invariants and costs). The site has them as HTML. FOLDER gets the same, and
sheets.pdf where Chromium is installed.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import markdown
import yaml

from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage

FOLDER = Path(__file__).parent
COURSE = FOLDER.parent / "course"
ALL = "all"
_COLOURS = re.compile(r":root \{(.*?)\}", re.DOTALL)


@cache
def sheets() -> dict[str, dict[str, Any]]:
    """Number of a stage -> what sheets.yml says."""
    text = (FOLDER / "sheets.yml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


def numbers() -> list[str]:
    return [stage.number for stage in STAGES if stage.number in sheets()]


def _text(sentence: str) -> str:
    """A sentence in Markdown as HTML; links lose their targets, which paper does not have."""
    flat = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    return markdown.markdown(flat).removeprefix("<p>").removesuffix("</p>")


def _list(sentences: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in sentences)}</ul>"


def _part(page: str, heading: str) -> str:
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _shapes(page: str, sheet: dict[str, Any]) -> str:
    """The rows of sheets.yml, or the page's table with a column of shapes."""
    rows = sheet.get("shapes")
    if rows is None:
        table = page[page.index("| Name | Shape") :].partition("\n\n")[0].splitlines()[2:]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _picture(page: str, sheet: dict[str, Any]) -> str:
    """The last picture of the page, if it has one; of one in steps, the chosen step."""
    names = re.findall(r'--8<-- "docs/figures/(.*)\.html"', page)
    if not names:
        return ""
    text = (FOLDER / f"{names[-1]}.html").read_text(encoding="utf-8")
    if "step" not in sheet:
        return f"<h2>Picture</h2>{text}"
    step = text.split('<div class="step">')[sheet["step"]].partition("</figure>")[0]
    return f'<h2>Picture</h2><figure class="picture"><div class="step">{step}</figure>'


def _section(stage: Stage) -> str:
    sheet, page = sheets()[stage.number], (COURSE / stage.page).read_text(encoding="utf-8")
    title = re.search(r"^# (\d\d) (.*)\n\n((?:.+\n)+)", page, re.MULTILINE)
    assert title is not None, stage.page
    blocks = re.findall(r"^```.*text.*\n((?:.*\n)*?)```", _part(page, "By hand"), re.MULTILINE)
    hand = [sheet["hand"]] if isinstance(sheet["hand"], int) else sheet["hand"]
    return f"""<section id="s{stage.number}">
<h1><small>{title[1]}</small>{_text(title[2])}</h1>
<p>{_text(title[3])}</p>
<h2>By hand</h2>{"".join(f"<pre>{html.escape(blocks[i])}</pre>" for i in hand)}
{_picture(page, sheet)}
<h2>Shapes</h2>{_shapes(page, sheet)}
<h2>Invariants</h2>{_list(sheet["invariants"])}
<h2>Costs</h2>{_list(sheet["costs"])}
<footer><code>diptych course grade {stage.number}</code><span>Diptych, stage {stage.number}</span></footer>
</section>"""


def page(name: str) -> str:
    """A file of HTML that needs no other: one sheet by the number of its stage, or all of them."""
    css = (FOLDER.parent / "stylesheets" / "figures.css").read_text(encoding="utf-8")
    colours, pictures = _COLOURS.search(css), css[css.index(".picture text {") : css.index("/* Home")]
    assert colours is not None
    style = (FOLDER / "sheets.css").read_text(encoding="utf-8")
    wanted = [stage for stage in STAGES if stage.number in sheets() and name in (ALL, stage.number)]
    what = "all stages" if name == ALL else f"stage {name}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>Diptych: sheet of {what}</title>'
        f"<style>:root {{{colours[1]}}}{style}{pictures}</style></head>"
        f"<body>{''.join(map(_section, wanted))}</body></html>\n"
    )


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*numbers(), ALL]:
        (folder / f"{name}.html").write_text(page(name), encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is not None:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
        target, source = folder / "sheets.pdf", (folder / f"{ALL}.html").resolve()
        command = [chromium, *options, f"--print-to-pdf={target}", source.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    print(f"{folder}: {len(numbers())} sheets" + ("" if chromium is None else ", sheets.pdf"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/sheets"))
