"""The status page and its snapshot."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request

import pytest

from diptych.shared.server.status import PAGE, TREE_SECONDS
from tests.server.running import RunningServer
from tests.server.test_faults import SUM, post


def test_the_page_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    with urllib.request.urlopen(server.url + "/", timeout=60) as answer:
        text = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
    assert text == PAGE.read_text(encoding="utf-8")
    assert "default-src 'none'" in policy
    assert re.findall(r"\w+://[^\s\"']*", text) == [
        "http://www.w3.org/2000/svg"
    ]  # a namespace, never fetched
    assert "<script src" not in text
    assert '<link rel="stylesheet' not in text


def test_the_snapshot_follows_the_engine(server: RunningServer) -> None:
    assert post(server, "/flush_cache", {})[0] == 200
    for question in ("What is 12 + 30?", "What is 12 + 31?"):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        assert post(server, "/v1/chat/completions", body)[0] == 200
    server.wait_idle()
    server.get("/status")
    time.sleep(TREE_SECONDS + 0.1)  # the tree is at most so old
    found = server.get("/status")
    nodes = found["tree"]["nodes"]
    ids, parents = [node["id"] for node in nodes], [node["parent"] for node in nodes]
    assert parents.count(0) == 1, "the conversations begin alike"
    assert len(set(ids) - set(parents)) == 2, "and end in two leaves"
    assert all(parent in [0, *ids[:i]] for i, parent in enumerate(parents)), "parents come first"
    cached = sum(node["num_tokens"] for node in nodes)
    assert cached == found["load"]["num_evictable_tokens"] == found["load"]["num_used_tokens"]
    assert not found["tree"]["is_cut"]


def test_the_page_is_public_and_its_data_are_not(locked_server: RunningServer) -> None:
    url = locked_server.url
    with urllib.request.urlopen(url + "/", timeout=60) as answer:
        assert answer.status == 200
    for path in ("/status", "/metrics", "/v1/models", "/openapi.json", "//", "/index.html"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url + path, timeout=60)
        assert caught.value.code == 401
    request = urllib.request.Request(url + "/status", headers={"Authorization": "Bearer root"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["model"] == "tiny-dense"
    body = {"messages": SUM, "max_tokens": 2}
    assert post(locked_server, "/v1/messages", body, **{"x-api-key": "secret"})[0] == 200
