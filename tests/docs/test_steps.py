"""The slider of a picture in headless Chromium: by mouse and by keyboard, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium, needs_chromium, set_screen

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as started:
        yield started


def open_figure(driver: Any, folder: Path, width: int = 1024, script: bool = True) -> None:
    """A page with the picture of the radix tree, its stylesheet and its script, from the disk."""
    style = (DOCS / "stylesheets" / "figures.css").read_text(encoding="utf-8")
    code = (DOCS / "javascripts" / "steps.js").read_text(encoding="utf-8") if script else ""
    body = (DOCS / "figures" / "radix-tree.html").read_text(encoding="utf-8")
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><style>{style}"
        f"</style><body class=md-typeset>{body}<script>{code}</script>",
        encoding="utf-8",
    )
    set_screen(driver, width)
    driver.get(page.as_uri())


def visible(driver: Any, selector: str) -> list[Any]:
    return [element for element in driver.find_elements("css selector", selector) if element.is_displayed()]


def shown(driver: Any) -> list[str]:
    """The texts of the steps that can be seen."""
    return [step.text.partition(".")[0] for step in visible(driver, ".step")]


@pytest.mark.parametrize("width", [390, 1440])
def test_buttons_and_keys(driver: Any, tmp_path: Path, width: int) -> None:
    open_figure(driver, tmp_path, width)
    back, following = driver.find_elements("css selector", ".controls button")
    slider = driver.find_element("css selector", ".controls input")
    assert shown(driver) == ["Step 1 of 9"]
    assert not back.is_enabled()
    following.click()
    following.click()
    assert shown(driver) == ["Step 3 of 9"]
    assert slider.get_attribute("aria-valuetext").startswith("Step 3 of 9. ")
    back.click()
    assert shown(driver) == ["Step 2 of 9"]
    slider.send_keys("\ue014")  # the right arrow key
    assert shown(driver) == ["Step 3 of 9"]
    slider.send_keys("\ue010")  # End
    assert shown(driver) == ["Step 9 of 9"]
    assert not following.is_enabled()
    assert driver.get_log("browser") == []


@pytest.mark.parametrize("width", [390, 1440])
def test_one_view_is_shown(driver: Any, tmp_path: Path, width: int) -> None:
    open_figure(driver, tmp_path, width)
    views = [svg.get_attribute("class") for svg in visible(driver, "svg")]
    assert views == ["narrow" if width == 390 else "wide"]


def test_without_javascript_all_steps_are_shown(driver: Any, tmp_path: Path) -> None:
    open_figure(driver, tmp_path, script=False)
    assert shown(driver) == [f"Step {number} of 9" for number in range(1, 10)]
