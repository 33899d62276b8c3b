"""Colours of the theme and of our style sheet contrast enough in both schemes; no text of ours is small."""

import colorsys
import re
from pathlib import Path

import pytest

material = pytest.importorskip("material")

ROOT = Path(__file__).parents[2]
SHEETS = Path(material.__file__).parent / "templates" / "assets" / "stylesheets"
OURS = sorted((ROOT / "docs" / "stylesheets").glob("*.css"))
SCHEMES = {"light": "default", "dark": "slate"}
CODE = ["keyword", "string", "number", "function", "constant", "name", "operator", "punctuation", "comment"]
PAGE, QUOTE = "--md-default-bg-color", "--md-code-bg-color"
PAIRS = [
    ("--md-default-fg-color", PAGE),
    ("--md-default-fg-color--light", PAGE),
    ("--md-accent-fg-color", PAGE),
    ("--md-typeset-a-color", PAGE),
    ("--md-typeset-a-color", QUOTE),
    ("--md-code-fg-color", QUOTE),
    *((f"--md-code-hl-{kind}-color", QUOTE) for kind in CODE),
    ("--md-primary-bg-color", "--md-primary-fg-color"),
    ("--md-footer-fg-color", "--md-footer-bg-color"),
    ("--md-footer-fg-color--light", "--md-footer-bg-color"),
]
"""(Text colour, background). The ratio is that of WCAG 2 for text of normal size."""
MIN_RATIO = 4.5
MIN_PX = 14.0
PX_PER_REM = 20.0  # the theme's root font size on screens up to 1600 px


def rules(sheet: Path) -> str:
    return re.sub(r"/\*.*?\*/", "", sheet.read_text(encoding="utf-8"), flags=re.DOTALL)


def variables(scheme: str) -> dict[str, str]:
    """The custom properties of a page in a scheme, as the cascade leaves them."""
    sheets = [*SHEETS.glob("main.*.css"), *SHEETS.glob("palette.*.css"), *OURS]
    active = {":root", f"[data-md-color-scheme={scheme}]", "[data-md-color-primary=indigo]"}
    active |= {
        "[data-md-color-accent=indigo]",
        f"[data-md-color-scheme={scheme}][data-md-color-primary=indigo]",
    }
    found: dict[str, tuple[int, str]] = {}  # property -> (specificity, value)
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", "\n".join(map(rules, sheets))):
        for selector in {part.strip().replace('"', "") for part in selectors.split(",")} & active:
            for name, value in re.findall(r"(--[\w-]+)\s*:\s*([^;]+)", body):
                if selector.count("[") >= found.get(name, (0, ""))[0]:
                    found[name] = (selector.count("["), value.strip())
    return {name: value for name, (_, value) in found.items()}


def color(value: str, known: dict[str, str]) -> tuple[float, float, float, float]:
    """(red, green, blue, alpha), each from 0 to 1, of #rgb, #rrggbb, #rrggbbaa, hsla() or var()."""
    value = re.sub(r"var\((--[\w-]+)\)", lambda match: known[match.group(1)], value)
    if "var(" in value:
        return color(value, known)
    if value.startswith("#"):
        digits = value[1:] if len(value) > 5 else "".join(2 * digit for digit in value[1:])
        red, green, blue, alpha = (int((digits + "ff")[i : i + 2], 16) / 255 for i in (0, 2, 4, 6))
        return red, green, blue, alpha
    hue, saturation, lightness, alpha = (float(x) for x in re.findall(r"[\d.]+", value))
    red, green, blue = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return red, green, blue, alpha


def over(front: tuple[float, ...], back: tuple[float, ...]) -> tuple[float, ...]:
    return (*(f * front[3] + b * (1 - front[3]) for f, b in zip(front[:3], back)), 1.0)


def ratio(front: tuple[float, ...], back: tuple[float, ...]) -> float:
    """WCAG 2: (L1 + 0.05) / (L2 + 0.05) of the relative luminances."""
    linear = [
        [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in x[:3]] for x in (front, back)
    ]
    dark, light = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in linear)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_contrasts_with_its_background(scheme: str) -> None:
    known = variables(SCHEMES[scheme])
    page = color(known["--md-default-bg-color"], known)
    low = {}
    for text, background in PAIRS:
        back = over(color(known[background], known), page)
        found = ratio(over(color(known[text], known), back), back)
        if found < MIN_RATIO:
            low[text] = round(found, 2)
    assert low == {}


def test_ratio_of_black_on_white() -> None:
    black, white = color("#000", {}), color("var(--paper)", {"--paper": "hsla(0deg, 0%, 100%, 1)"})
    assert ratio(black, white) == pytest.approx(21.0)
    assert ratio(over(color("#00000080", {}), white), white) == pytest.approx(4.0, abs=0.01)


def test_no_text_of_ours_is_small() -> None:
    css = "\n".join(map(rules, OURS))
    sizes = re.findall(r"font(?:-size)?:\s*(?:max\()?([\d.]+)(rem|px)", css)
    assert len(sizes) == len(re.findall(r"font(?:-size)?:", css)), "in rem or px"
    assert [size for size in sizes if float(size[0]) * {"rem": PX_PER_REM, "px": 1.0}[size[1]] < MIN_PX] == []
