"""Pictures are what `make figures` makes, are used by a page, and can be read without seeing them."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.figures.__main__ import FIGURES, FILES, FOLDER, main, remake
from docs.figures.svg import STYLES

ROOT = Path(__file__).parents[2]
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}

each_figure = pytest.mark.parametrize("name", FIGURES)


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.html").read_text(encoding="utf-8")


def svgs_of(name: str) -> list[ElementTree.Element]:
    """The text of a figure is well-formed XML, except for its entities."""
    found = ElementTree.fromstring(text_of(name)).iter("{http://www.w3.org/2000/svg}svg")
    return [svg for svg in found if svg.get("class")]  # the others are parts of a view


@pytest.mark.parametrize("file", [*(f"{name}.html" for name in FIGURES), *FILES])
def test_remaking_gives_no_difference(file: str) -> None:
    assert remake(file) == (FOLDER / file).read_text(encoding="utf-8"), "run `make figures`"


@pytest.mark.parametrize("file", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda file: file.name)
def test_a_browser_can_read_each_picture(file: Path) -> None:
    assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_files_and_names_agree() -> None:
    assert {path.stem for path in FOLDER.glob("*.html")} == set(FIGURES)
    assert {path.name for path in FOLDER.glob("*.[sj][vs]*")} == set(FILES)


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith(".svg")])
def test_the_readme_shows_it(file: str) -> None:
    """A file of its own has its style in it, and is well-formed."""
    assert f"](docs/figures/{file})" in (ROOT / "README.md").read_text(encoding="utf-8")
    text = (FOLDER / file).read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert "prefers-reduced-motion" in text
    assert "md-color-scheme" not in text


@each_figure
def test_drawings_have_titles_and_fit(name: str) -> None:
    """A drawing has two views of a fixed width, or one whose x are percents; boxes fit by themselves."""
    views = [svg.get("class", "") for svg in svgs_of(name)]
    assert views.count("wide") == views.count("narrow")
    assert views or '<div class="boxes">' in text_of(name)
    for svg in svgs_of(name):
        title = svg.find("{http://www.w3.org/2000/svg}title")
        assert title is not None
        assert title.text
        assert len(title.text) < 60
        assert svg.find("{http://www.w3.org/2000/svg}desc") is not None
        width, height = (float(svg.get(key, 100)) for key in ("width", "height"))
        pixel = 1.0 if svg.get("width") else 100 / 350  # of the narrowest page
        for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, across, down = (number(rect, key) for key in ("x", "y", "width", "height"))
            assert x + across <= width + 0.5
            assert y + down <= height + 0.5
        for text in svg.iter("{http://www.w3.org/2000/svg}text"):
            assert estimated_end(text, pixel) <= width + 4 * pixel, text.text


def number(element: ElementTree.Element, key: str) -> float:
    return float(element.get(key, "0").rstrip("%"))


def estimated_end(text: ElementTree.Element, pixel: float) -> float:
    classes = (text.get("class") or "").split()
    width = 8.45 if "m" in classes else 8.2 if {"b", "h"} & set(classes) else 6.9
    x, length = number(text, "x"), len(text.text or "") * width * pixel
    return x if "end" in classes else x + length / 2 if "mid" in classes else x + length


@each_figure
def test_a_page_includes_it_and_has_its_styles(name: str) -> None:
    assert [path for path, page in PAGES.items() if f'--8<-- "docs/figures/{name}.html"' in page]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|<img|@import|url\(", text_of(name))
    styles = STYLES.read_text(encoding="utf-8")
    used = {each for value in re.findall(r'class="([^"]*)"', text_of(name)) for each in value.split()}
    assert {each for each in used if f".{each}" not in styles} <= {"steps"}


@pytest.mark.parametrize("selector", [":root", '[data-md-color-scheme="slate"]'])
def test_text_contrasts_with_its_fill(selector: str) -> None:
    styles = STYLES.read_text(encoding="utf-8")
    block = styles.partition(f"{selector} {{")[2].partition("}")[0]
    known = {name: luminance(value) for name, value in re.findall(r"--(\w+): #(\w+);", block)}
    pairs = [("ink", fill) for fill in ("paper", "none", "grey", "fa", "fb", "fc", "fd", "fe")]
    pairs += [("soft", "paper"), ("soft", "none"), *(("paper", strong) for strong in ("sa", "sb", "sc"))]
    low = {}
    for pair in pairs:
        dark, light = sorted(known[name] + 0.05 for name in pair)
        if light / dark < 4.5:
            low[pair] = light / dark
    assert low == {}


def luminance(digits: str) -> float:
    """Relative, of WCAG 2: from 0 for #000 to 1 for #ffffff."""
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    linear = []
    for i in (0, 2, 4):
        part = int(digits[i : i + 2], 16) / 255
        linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_steps_have_texts() -> None:
    """What the slider (docs/javascripts/steps.js) needs: elements `.step` in `figure.steps`, a `p` first."""
    with_steps = [name for name in FIGURES if "steps" in text_of(name).partition(">")[0]]
    assert {"page-pool", "radix-tree"} <= set(with_steps)
    for name in with_steps:
        steps = [div for div in ElementTree.fromstring(text_of(name)) if div.get("class") == "step"]
        assert len(steps) >= 2
        for number, step in enumerate(steps, start=1):
            assert [child.tag.rpartition("}")[2] for child in step] == ["p", "div"]
            assert step[0][0].text == f"Step {number} of {len(steps)}."


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no figure is named"):
        main(["no_such_figure"])
