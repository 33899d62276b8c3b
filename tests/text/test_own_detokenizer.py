"""A detokenizer of the user makes the texts: in process, and behind the server."""

from __future__ import annotations

import json
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from diptych.shared.engine.llm import LLM

LOUD = """
from diptych.reference.detokenizer import IncrementalDetokenizer

class Loud(IncrementalDetokenizer):
    def append(self, *args):
        return super().append(*args).upper()
"""


@pytest.fixture
def loud(tmp_path: Path) -> str:
    (tmp_path / "loud.py").write_text(LOUD)
    return f"{tmp_path / 'loud.py'}:Loud"


def test_in_process(loud: str) -> None:
    texts = []
    for use in ({}, {"detokenizer": loud}):
        llm = LLM("tiny-dense", use=use, device="cpu", max_total_tokens=256)
        texts.append(llm.generate("Otto is a baker. Otto", temperature=0, max_tokens=8, progress=False).text)
    assert texts[1] == texts[0].upper() != texts[0]


@pytest.mark.full
@pytest.mark.skipif(find_spec("fastapi") is None, reason="needs the extra `server`")
def test_behind_the_server(loud: str) -> None:
    from tests.server.running import serving

    body = {"prompt": "Otto is a baker. Otto", "temperature": 0, "max_tokens": 8}
    with serving("--use", f"detokenizer={loud}") as server:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.loads(answer.read())["choices"][0]["text"]
    assert text == text.upper() != text.lower()
