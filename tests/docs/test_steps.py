"""The sliders of pictures in headless Chromium: mouse and keyboard, light and dark, without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium, needs_chromium, set_screen

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BODIES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "figures").glob("*.html"))}
LAYOUT = Path(__file__).with_name("layout.js").read_text(encoding="utf-8")
SLIDERS = [name for name, body in BODIES.items() if re.match(r'<figure class="[^"]*\bsteps\b', body)]
BACKGROUNDS = {"default": "rgb(255, 255, 255)", "slate": "rgb(30, 33, 41)"}
"""Of the site, by its colour scheme."""

pytestmark = needs_chromium
each_slider = pytest.mark.parametrize("name", SLIDERS)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as started:
        yield started


def open_figure(driver: Any, folder: Path, name: str, width: int = 1024, script: bool = True) -> list[str]:
    """A page from the disk: a picture with its stylesheet and script. Returns the titles of the steps."""
    style = (DOCS / "stylesheets" / "figures.css").read_text(encoding="utf-8")
    code = (DOCS / "javascripts" / "steps.js").read_text(encoding="utf-8") if script else ""
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><style>{style}"
        f"html {{ font-size: 20px }} body {{ color: var(--ink) }} "
        f"button, code {{ background: none; font-size: 0.7rem }}</style><body class=md-typeset>"
        f"<main class=md-content>{BODIES[name]}</main><script>{code}</script>",
        encoding="utf-8",
    )
    set_screen(driver, width)
    driver.get(page.as_uri())
    num_steps = BODIES[name].count('<div class="step')
    return [f"Step {number} of {num_steps}" for number in range(1, num_steps + 1)]


def visible(driver: Any, selector: str) -> list[Any]:
    return [element for element in driver.find_elements("css selector", selector) if element.is_displayed()]


def shown(driver: Any) -> list[str]:
    """The titles of the steps that can be seen."""
    return [step.text.partition(".")[0] for step in visible(driver, ".step")]


@each_slider
def test_buttons_and_keys(driver: Any, tmp_path: Path, name: str) -> None:
    titles = open_figure(driver, tmp_path, name)
    back, following = driver.find_elements("css selector", ".controls button")
    slider = driver.find_element("css selector", ".controls input")
    assert shown(driver) == titles[:1]
    assert not back.is_enabled()
    for title in titles[1:]:
        following.click()
        assert shown(driver) == [title]
        assert slider.get_attribute("aria-valuetext").startswith(f"{title}. ")
    assert not following.is_enabled()
    back.click()
    assert shown(driver) == titles[-2:-1]
    slider.send_keys("\ue011")  # Home
    assert shown(driver) == titles[:1]
    slider.send_keys("\ue014")  # the right arrow key
    assert shown(driver) == titles[1:2]
    slider.send_keys("\ue010")  # End
    assert shown(driver) == titles[-1:]
    assert driver.get_log("browser") == []


@pytest.mark.parametrize("width", [390, 1440])
@each_slider
def test_every_step_is_legible(driver: Any, tmp_path: Path, name: str, width: int) -> None:
    """As whole pages are (tests/docs/test_layout.py): in the screen, large and with enough contrast."""
    for title in open_figure(driver, tmp_path, name, width):
        for scheme, background in BACKGROUNDS.items():
            driver.execute_script(
                "document.body.dataset.mdColorScheme = arguments[0];"
                "document.body.style.background = arguments[1]", scheme, background,
            )  # fmt: skip
            assert driver.execute_script(LAYOUT) == [], (title, scheme)
        driver.find_elements("css selector", ".controls button")[1].click()


@each_slider
def test_without_javascript_all_steps_are_shown(driver: Any, tmp_path: Path, name: str) -> None:
    titles = open_figure(driver, tmp_path, name, script=False)
    assert shown(driver) == titles
