"""The proxy by itself: without a fault it passes everything on, and each fault changes an answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server_check.faults import load
from tests.server_check.faulty_proxy import FaultyProxy, Reply
from tests.server_check.local_server import LocalServer

IDS = list(range(40, 180))
SCORE = {"prompt": IDS, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 3}
STREAM = {"prompt": IDS[:8], "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}


async def pass_on(body: dict[str, Any], ask: Any, proxy: FaultyProxy) -> Reply:
    reply: Reply = await ask(body)
    return reply


def test_a_fault_that_changes_nothing_gives_the_same_answers(proxied: LocalServer) -> None:
    answers = []
    for fault in (None, pass_on):
        proxied.proxy.plant(fault)
        whole = httpx.post(f"{proxied.url}/v1/completions", json=SCORE)
        stream = httpx.post(f"{proxied.url}/v1/completions", json=STREAM)
        bad = httpx.post(f"{proxied.url}/v1/completions", json={"prompt": 3})
        broken = httpx.post(f"{proxied.url}/v1/completions", content=b"{")
        events = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
        texts = [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]"]
        answers.append(
            [
                whole.json()["choices"],
                stream.headers["content-type"].partition(";")[0],
                ("".join(texts), events[-1]),  # tokens that come together may be one chunk
                (bad.status_code, bad.json()["error"], broken.status_code, broken.json()["error"]),
            ]
        )
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["wrong position", "stale page", "chunk border", "low logprobs"])
def test_faults_of_scores_change_some_log_probabilities(proxied: LocalServer, name: str) -> None:
    def score() -> list[float]:
        answer = httpx.post(f"{proxied.url}/v1/completions", json=SCORE).json()
        values: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return values[: len(IDS)]

    right = score()
    proxied.proxy.plant(load()[0][name].plant)
    wrong = score()
    first = {"wrong position": 1, "stale page": 17, "chunk border": 101, "low logprobs": 1}[name]
    assert len(right) == len(wrong)
    differs = [i for i in range(1, len(IDS)) if abs(right[i] - wrong[i]) > 1e-3]
    assert first <= differs[0] <= first + 1  # the second token's value has no other before it
