"""A recorded run: what it says agrees with the engine, and the page needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.record.page import html_of
from diptych.shared.tools.record.recorded_run import Arrival, Recorder
from diptych.shared.tools.record.texts import runs
from diptych.shared.types import SamplingParams
from tests.browser import chromium, needs_chromium, set_screen

ROOT = Path(__file__).parents[2]
QUESTIONS = ("What is 7 + 8?", "Count from 3 to 5.", "What is 7 + 5?")


def make(**flags: Any) -> tuple[LLM, dict[str, Any]]:
    small = {"page_size": 4, "max_total_tokens": 56, "chunked_prefill_size": 16, "max_running_requests": 3}
    llm = LLM("tiny-dense", device="cpu", dtype="float32", **{**small, **flags})
    params = [SamplingParams(temperature=t, max_new_tokens=9, seed=3) for t in (0, 0, 0.8)]
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    arrivals = [Arrival(i, *three) for i, three in enumerate(zip(QUESTIONS, prompts, params))]
    return llm, Recorder(llm).run(arrivals)


@pytest.fixture(scope="module")
def made() -> tuple[LLM, dict[str, Any]]:
    return make(panel="reference")


@pytest.fixture
def run(made: tuple[LLM, dict[str, Any]]) -> dict[str, Any]:
    return made[1]


def events(run: dict[str, Any]) -> Iterator[str]:
    return (text for step in run["steps"] for _, _, text in step["events"])


def test_answers_are_those_of_the_engine(made: tuple[LLM, dict[str, Any]]) -> None:
    llm, run = made
    assert [request["answer"] for request in run["requests"]][:2] == ["7 + 8 = 15", "3, 4, 5"]
    tokens = {request["name"]: "" for request in run["requests"]}
    for step in run["steps"]:
        for rid, place, text, _, p, rank, others, counts in step["tokens"]:
            assert counts
            assert 0 < p <= 1
            assert rank >= len(others) or others[rank][0] == text
            tokens[rid] += text
            assert place >= 0
    assert tokens == {request["name"]: request["answer"] + "‹end›" for request in run["requests"]}
    assert "forward_and_sample" not in vars(llm.assembly.parts.model_runner), "methods are put back"


def test_page_tables_and_tree_own_all_pages(run: dict[str, Any]) -> None:
    tables: dict[str, list[int]] = {}
    cached: set[int] = set()
    for step in run["steps"]:
        for rid, change in step["tables"].items():
            if change is None:
                del tables[rid]
            else:
                tables[rid] = tables.get(rid, [])[: change[0]] + change[1:]
        cached = (cached | set(step["cached"][0])) - set(step["cached"][1])
        taken = cached.union(*tables.values())
        assert len(taken) * 4 == 56 - step["memory"][0]
    assert tables == {}


def test_reasons(run: dict[str, Any]) -> None:
    texts = list(events(run))
    for start in (
        "Request A starts: 0 of its 16 tokens are in the prefix cache, 16 are computed now.",
        "Request C waits: 3 pages free, 5 pages needed. Needed: 8 tokens to compute and at most 9 to answer.",
        "Memory is short by",
        "An edge is split behind",
        "The sampler draws a token for 1 request",
    ):
        assert any(text.startswith(start) for text in texts), start
    assert all(code in run["code"] for step in run["steps"] for code, _, _ in step["events"])
    assert {file for file, _, _ in run["code"].values()} >= {"reference/scheduler.py", "reference/sampler.py"}


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        {"panel": "optimized"},
        {"use": {"radix_cache": f"{ROOT}/docs/examples/my_radix_cache.py:MyRadixCache"}},
        {"panel": "reference", "speculative": "ngram"},
        {"panel": "reference", "enable_mixed_chunk": True, "max_total_tokens": 256},
        {"panel": "reference", "disable_radix_cache": True},
    ],
    ids=str,
)
def test_any_engine(flags: dict[str, Any]) -> None:
    _, run = make(**flags)
    assert [request["answer"] for request in run["requests"]][:2] == ["7 + 8 = 15", "3, 4, 5"]
    assert any(text.startswith("The model runs once") for text in events(run))


def test_page_has_all_it_needs(run: dict[str, Any]) -> None:
    page = html_of(run)
    assert len(page) < 100_000
    assert not re.search(r"https?://|<link|<img|@import|url\(|\bsrc=", page)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data.group(1)) == json.loads(json.dumps(run))


@needs_chromium
@pytest.mark.full
def test_page_in_a_browser(run: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(html_of(run), encoding="utf-8")
    with chromium() as driver:
        for width, scheme in ((1440, "light"), (390, "dark")):
            set_screen(driver, width, scheme)
            driver.get("about:blank")
            driver.get(f"file://{file}#step=2&view=pool")
            for key in ("queue", "batch", "pool", "tree", "logits", "time", "code"):
                for step in range(len(run["steps"])):
                    driver.execute_script(f"view = {key!r}; show({step})")
                    assert driver.find_element("id", "view").text
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_runs_of_numbers() -> None:
    assert runs([3, 1, 2, 7]) == "1–3, 7"
