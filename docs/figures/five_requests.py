"""One run that pages come back to: five requests in a small pool, recorded step by step.

The recording is docs/figures/five-requests.json, without the code, which the page gets from the tree when the
site is built. Times differ from run to run: a new recording is kept only if anything else differs.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

from diptych.shared.tools.record.page import html_of

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("five-requests.json")
ARRIVALS = (
    (0, "What is 7 + 8?"),
    (0, "Count from 3 to 5."),
    (2, "What is 2 + 3?"),
    (4, "Count from 7 to 9."),
    (6, "What is 7 + 5?"),
)
"""(step, question)"""
EXACT: dict[str, Any] = {"panel": "reference", "device": "cpu", "dtype": "float32"}
"""Flags of every run that a picture shows. In float32 the results are the same everywhere."""
FLAGS: dict[str, Any] = {
    **EXACT,
    "page_size": 4,
    "max_total_tokens": 84,
    "chunked_prefill_size": 24,
    "max_running_requests": 3,
}
"""Of the engine: so small that a prompt is cut, requests wait, and prefixes are evicted."""


@cache
def record() -> dict[str, Any]:
    from diptych.shared.engine.llm import LLM
    from diptych.shared.tools.record.recorded_run import Arrival, Recorder
    from diptych.shared.types import SamplingParams

    llm = LLM("tiny-dense", **FLAGS)
    params = SamplingParams(temperature=0, max_new_tokens=16)
    arrivals = []
    for step, question in ARRIVALS:
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        assert isinstance(prompt, list)
        arrivals.append(Arrival(step, question, prompt, params))
    run = Recorder(llm).run(arrivals)
    for key, (file, _line, _text) in run["code"].items():
        module = file.removesuffix(".py").replace("/", ".")
        run["code"][key] = [file, key.removeprefix(f"diptych.{module}.")]
    return run


def without_times(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "steps": [{**step, "time": None} for step in json.loads(json.dumps(run["steps"]))]}


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def make() -> str:
    """The recording: the one in the tree, if a new one differs in nothing but times."""
    run = record()
    if FILE.exists() and without_times(recorded()) == without_times(run):
        run = recorded()
    return json.dumps(run, ensure_ascii=False, separators=(",", ":")) + "\n"


def page(sources: str) -> str:
    """The page of the recording. sources: where the site has the pages of files, relative to the page."""
    run = recorded()
    links = {}
    for key, (file, name) in run["code"].items():
        run["code"][key] = [file, *source_of(ROOT / file, name)]
        links[file] = f"{sources}/{file.removesuffix('.py')}/"
    run["facts"]["source_pages"] = links
    return html_of(run)


def source_of(path: Path, name: str) -> tuple[int, str]:
    """First line and text of `Class.method` or a function in a file."""
    text = path.read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return first, "\n".join(line[indent:] for line in lines)
