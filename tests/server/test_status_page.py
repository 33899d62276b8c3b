"""The status page in headless Chromium, where selenium, Chromium and its driver are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser import chromium, needs_chromium, set_screen
from tests.server.running import RunningServer, serving
from tests.server.test_faults import SUM, post

pytestmark = needs_chromium


@pytest.fixture
def open_page(server: RunningServer) -> Iterator[Callable[..., Any]]:
    drivers = []

    def open_it(width: int = 1280, *, scheme: str = "light", url: str = server.url) -> Any:
        driver = stack.enter_context(chromium())
        drivers.append(driver)
        set_screen(driver, width, scheme)
        driver.get(url + "/")
        wait(driver, lambda: text_of(driver, "state") != "connecting")
        return driver

    with ExitStack() as stack:
        yield open_it
        for driver in drivers:
            log = [entry["message"] for entry in driver.get_log("browser")]
            assert [message for message in log if "401" not in message] == []


def wait(driver: Any, condition: Callable[[], bool]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20, 0.1).until(lambda _: condition())


def text_of(driver: Any, name: str) -> str:
    text: str = driver.find_element("id", name).text
    return text


def test_load_and_tree_are_drawn(server: RunningServer, open_page: Callable[..., Any]) -> None:
    for question in ("What is 12 + 30?", "What is 12 + 31?"):
        post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": question}]})
    driver = open_page()
    wait(driver, lambda: len(driver.find_elements("css selector", "#tree rect")) >= 3)
    assert "nodes" in text_of(driver, "tree-text")
    assert "16,384 tokens" in text_of(driver, "pool-text")
    assert (text_of(driver, "running"), text_of(driver, "waiting")) == ("0", "0")
    assert float(text_of(driver, "hits")) > 0


def test_chat(open_page: Callable[..., Any]) -> None:
    driver = open_page()
    for question, answer in ((SUM[0]["content"], "12 + 30 = 42"), ("<b>What is 2 + 3?</b>", "")):
        driver.find_element("id", "question").send_keys(question)
        driver.find_element("id", "send").click()
        wait(driver, lambda: text_of(driver, "send") == "Send")
        assert question in text_of(driver, "talk"), "shown as it was written, not as HTML"
        assert answer in text_of(driver, "talk")
    assert "output tokens" in text_of(driver, "talk")
    driver.find_element("id", "clear").click()
    assert text_of(driver, "talk") == ""


@pytest.mark.parametrize("width", [390, pytest.param(768, marks=pytest.mark.full), 1600])
def test_nothing_is_wider_than_the_screen(open_page: Callable[..., Any], width: int) -> None:
    driver = open_page(width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width


def test_light_and_dark(open_page: Callable[..., Any]) -> None:
    colors = {}
    for scheme in ("light", "dark"):
        body = open_page(scheme=scheme).find_element("tag name", "body")
        text, page = body.value_of_css_property("color"), body.value_of_css_property("background-color")
        colors[scheme] = [int(color.split("(")[1].split(",")[0]) for color in (text, page)]
    assert colors["light"][0] < 80 < 200 < colors["light"][1]
    assert colors["dark"][1] < 80 < 200 < colors["dark"][0]


def test_the_page_asks_for_the_key(open_page: Callable[..., Any]) -> None:
    with serving("--api-key", "secret") as guarded:
        driver = open_page(url=guarded.url)
        assert text_of(driver, "state") == "API key needed"
        assert driver.find_element("id", "key").is_displayed()
        driver.find_element("id", "key-input").send_keys("secret\n")
        wait(driver, lambda: text_of(driver, "state") == "ready")
        assert not driver.find_element("id", "key").is_displayed()
        driver.find_element("id", "send").click()
        wait(driver, lambda: "12 + 30 = 42" in text_of(driver, "talk"))
        driver.get("about:blank")  # else the page asks the server that ends for its status
