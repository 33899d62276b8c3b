"""Every page in headless Chromium: nothing is cut off, small or faint at three widths, light and dark, and no
script fails."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium, needs_chromium, set_screen

ROOT = Path(__file__).parents[2]
LAYOUT = Path(__file__).with_name("layout.js").read_text(encoding="utf-8")
WITHOUT_TRANSITIONS = """document.head.insertAdjacentHTML("beforeend",
    "<style>*, *::before, *::after { transition: none !important }</style>")"""
SKIPPED = [("source",)]  # whole files

pytestmark = [needs_chromium, pytest.mark.full]


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def site(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Its address, and its pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    pages = [page.parent.relative_to(folder) for page in sorted(folder.rglob("index.html"))]
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = [page.as_posix() for page in pages if page.parts[:1] not in SKIPPED]
        yield f"http://127.0.0.1:{server.server_port}", shown
        server.shutdown()


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_layout(driver: Any, site: tuple[str, list[str]], width: int) -> None:
    address, pages = site
    assert len(pages) > 30
    wrong = []
    set_screen(driver, width)
    for page in pages:
        driver.get(f"{address}/{page}/")
        driver.execute_script(WITHOUT_TRANSITIONS)
        for scheme in ("default", "slate"):
            driver.execute_script("document.body.dataset.mdColorScheme = arguments[0]", scheme)
            wrong += [f"{page}, {scheme}: {found}" for found in driver.execute_script(LAYOUT)]
        errors = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        wrong += [f"{page}: console: {error}" for error in errors]
    assert wrong == []


def first_of(driver: Any, selector: str) -> Any:
    """The first element, as soon as there is one."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, 20).until(lambda _: driver.find_elements("css selector", selector))[0]


NOTE = ".md-tooltip--active .md-tooltip__inner"


def text_of_notes(driver: Any) -> str:
    """Texts of the notes that are open and visible."""
    return " ".join(note.text for note in driver.find_elements("css selector", NOTE))


@pytest.mark.parametrize("width", [1440, 390])
def test_an_annotation_opens(driver: Any, site: tuple[str, list[str]], width: int) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    set_screen(driver, width)
    driver.get(f"{site[0]}/course/05-radix-cache/")
    driver.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    marker = first_of(driver, ".highlight .md-annotation__index")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", marker)
    WebDriverWait(driver, 20).until(lambda _: "first page of its tokens" in text_of_notes(driver))
    note = driver.find_element("css selector", NOTE)
    left, right = note.rect["x"], note.rect["x"] + note.rect["width"]
    assert 0 <= left < right <= width
    assert note.value_of_css_property("text-indent") == "0px"  # not that of the line of code


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("radix cache", "course/05-radix-cache"),
        ("overlap", "course/09-overlap"),
        ("paged attention", "course/02-paged-memory"),
        ("CUDA graph", "course/08-cuda-graphs"),
        ("chunked prefill", "course/04-chunked-prefill"),
    ],
)
def test_search_finds_the_concept_before_its_measurements(
    driver: Any, site: tuple[str, list[str]], query: str, page: str
) -> None:
    set_screen(driver, 1440)
    driver.get(f"{site[0]}/?q={query}")
    first = first_of(driver, ".md-search-result__link")
    assert first.get_attribute("href").startswith(f"{site[0]}/{page}/")
