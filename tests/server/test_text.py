"""Concatenated stream == whole text == full decode, over random tokens: parts of characters, emoji, stops."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.text.tokenizer import Tokenizer
from tests.server.running import RunningServer, at_once, serving

RANDOM = {"temperature": 20.0, "n": 3, "ignore_eos": True}


def post(server: RunningServer, path: str, body: dict[str, Any]) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: bytes = answer.read()
    return found


def events(data: bytes) -> list[dict[str, Any]]:
    """The chunks; asserts the framing."""
    frames = data.decode("ascii").split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-1])
    return [json.loads(frame[6:]) for frame in frames[:-2]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model_path("tiny-dense"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 6))])
def test_random_tokens(server: RunningServer, tokenizer: Tokenizer, seed: int) -> None:
    params = {**RANDOM, "max_new_tokens": 40, "seed": seed, "skip_special_tokens": False}
    prompt = "naïve 🙂 日"
    native = json.loads(post(server, "/generate", {"text": prompt, "sampling_params": params}))
    body = {
        "prompt": prompt,
        "max_tokens": 40,
        "seed": seed,
        "skip_special_tokens": False,
        "logprobs": 0,
        **RANDOM,
    }
    whole = json.loads(post(server, "/v1/completions", body))
    chunks = events(post(server, "/v1/completions", {**body, "stream": True}))
    for index, answer in enumerate(native):
        context = tokenizer.encode(prompt)
        decoded = tokenizer.decode(context + answer["output_ids"])[len(tokenizer.decode(context)) :]
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert answer["text"] == decoded == whole["choices"][index]["text"]
        assert "".join(choice["text"] for choice in mine) == decoded
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        for name, values in whole["choices"][index]["logprobs"].items():
            pieces = [choice["logprobs"][name] for choice in mine if choice["logprobs"]]
            found = [value for piece in pieces for value in piece]
            if name in ("tokens", "text_offset"):
                assert found == values
            elif name == "token_logprobs":  # float32 sums in another order: the prompt is cached by now
                assert found == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    "length", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(5, marks=pytest.mark.full)]
)
def test_stops_cut_anywhere(server: RunningServer, length: int) -> None:
    """A stop text taken out of a known answer ends that answer right before it, wherever it lies."""
    body = {"prompt": "Count:", "max_tokens": 30, "seed": 3, "ignore_eos": True, "temperature": 20.0}
    text = json.loads(post(server, "/v1/completions", body))["choices"][0]["text"]

    def check(stop: str) -> None:
        whole = json.loads(post(server, "/v1/completions", {**body, "stop": [stop]}))["choices"][0]
        assert whole["text"] == text[: text.index(stop)]
        assert (whole["finish_reason"], whole["matched_stop"]) == ("stop", stop)
        chunks = events(post(server, "/v1/completions", {**body, "stop": [stop], "stream": True}))
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["text"]

    at_once(check, {text[start : start + length] for start in range(0, len(text) - length, 13)})


def test_token_ids_of_a_stream(server: RunningServer) -> None:
    """With return_token_ids the ids of all chunks are the answer's, whatever text they make."""
    body = {"prompt": "naïve 🙂 日", "max_tokens": 40, "seed": 5, "return_token_ids": True, **RANDOM}
    whole = json.loads(post(server, "/v1/completions", body))["choices"]
    chunks = events(post(server, "/v1/completions", {**body, "stream": True}))
    for index, choice in enumerate(whole):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [token_id for c in mine for token_id in c["token_ids"]] == choice["token_ids"]
        assert len(choice["token_ids"]) == 40
        assert "".join(c["text"] for c in mine) == choice["text"]


def test_a_model_without_a_tokenizer_streams_token_ids(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(resolve_model_path("tiny-dense")) / name)
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with serving("--model", str(tmp_path)) as server:
        whole = json.loads(post(server, "/v1/completions", body))["choices"][0]
        chunks = events(post(server, "/v1/completions", {**body, "stream": True}))
    pieces = [choice["token_ids"] for chunk in chunks for choice in chunk["choices"]]
    assert whole["text"] == ""
    assert len(whole["token_ids"]) == 12
    assert [token_id for piece in pieces for token_id in piece] == whole["token_ids"]
    assert len(pieces) > 3  # as they come, not all at the end
