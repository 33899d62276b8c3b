"""Requests and answers of lm-eval, sglang.bench_serving and vllm bench serve, as they send and read them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from tests.server.running import RunningServer
from tests.server.test_faults import post

TEXT = "Mara lives in Bergen. Mara works as a baker."


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="tiny-dense")


def lines(server: RunningServer, path: str, body: dict[str, Any]) -> Iterator[str]:
    """The data of each event, read line by line."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        for line in answer:
            if line.strip():
                assert line.startswith(b"data: ")
                yield line[len(b"data: ") :].decode().strip()


def chunks(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    *found, end = lines(server, path, body)
    assert end == "[DONE]"
    return [json.loads(each) for each in found]


# ---- lm-eval, local-completions ----


def test_lm_eval_probes_the_tokenizer(server: RunningServer, llm: LLM) -> None:
    assert llm.tokenizer is not None
    assert server.get("/tokenizer_info")["eos_token"] == llm.tokenizer.hf_tokenizer.eos_token
    status, answer = post(server, "/tokenize", {"prompt": TEXT, "add_special_tokens": False})
    assert (status, answer["tokens"]) == (200, llm.tokenizer.encode(TEXT, add_special_tokens=False))


def test_lm_eval_scores_continuations(server: RunningServer, llm: LLM) -> None:
    """The sum of log-probabilities of a continuation, and whether it is the greedy one."""
    assert llm.tokenizer is not None
    context = llm.tokenizer.encode("Mara lives in Bergen. Mara lives in")
    greedy = llm.generate(context, SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True))
    ends = [greedy.output_ids, llm.tokenizer.encode(" Lima", add_special_tokens=False)]
    scoring = SamplingParams(max_new_tokens=1, temperature=0, return_logprob=True, logprob_start_len=0)
    body = {
        "model": "tiny-dense", "prompt": [context + end for end in ends], "max_tokens": 1, "logprobs": 1,
        "echo": True, "temperature": 0, "seed": 1234,
    }  # fmt: skip
    status, answer = post(server, "/v1/completions", body)
    assert status == 200
    scores = []
    for choice, end in zip(sorted(answer["choices"], key=lambda choice: choice["index"]), ends):
        logprobs = choice["logprobs"]
        values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
        num_tokens = len(context) + len(end) + 1  # one generated token, even if it is EOS
        assert len(values) == len(tops) == num_tokens
        values, tops = values[len(context) : -1], tops[len(context) : -1]
        scores.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops))))
        offline = llm.generate(context + end, scoring).input_logprobs[len(context) :]
        assert scores[-1][0] == pytest.approx(sum(each.logprob or 0.0 for each in offline), abs=1e-3)
    assert [is_greedy for _, is_greedy in scores] == [True, False]


def test_lm_eval_generates(server: RunningServer) -> None:
    body = {
        "model": "tiny-dense", "prompt": ["Count from 3 to 9: 3, 4,"], "max_tokens": 32, "temperature": 0,
        "stop": ["\n", "7", "<|im_end|>"], "seed": 1234,
    }  # fmt: skip
    status, answer = post(server, "/v1/completions", body)
    assert status == 200
    assert "7" not in answer["choices"][0]["text"]


# ---- sglang.bench_serving ----


def test_sglang_bench_completions(server: RunningServer) -> None:
    assert server.get("/v1/models")["data"][0]["id"] == "tiny-dense"
    assert server.get("/model_info")["is_generation"]
    assert server.get("/server_info")["internal_states"][0]["avg_spec_accept_length"] == 0
    assert post(server, "/flush_cache?timeout=60", b"")[0] == 200
    body = {
        "model": "tiny-dense", "prompt": TEXT, "temperature": 0.0, "best_of": 1, "max_tokens": 12,
        "stream": True, "ignore_eos": True, "lora_path": None, "return_logprob": False,
        "return_routed_experts": False, "stream_options": {"include_usage": True},
    }  # fmt: skip
    found = chunks(server, "/v1/completions", body)
    text, output_len = "", None
    for chunk in found:
        output_len = (chunk.get("usage") or {}).get("completion_tokens", output_len)
        if chunk["choices"]:
            text += chunk["choices"][0]["text"]
    assert output_len == 12
    whole = post(server, "/v1/completions", {**body, "stream": False, "stream_options": None})[1]
    assert whole["choices"][0]["text"] == text
    without_usage = chunks(server, "/v1/completions", {**body, "stream_options": None})
    assert "".join(chunk["choices"][0]["text"] for chunk in without_usage) == text  # read on every chunk


def test_sglang_bench_native(server: RunningServer, llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(TEXT)
    for name, value in (("text", TEXT), ("input_ids", prompt)):
        body = {
            name: value,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
            "stream": True, "lora_path": None, "return_logprob": False, "return_routed_experts": False,
            "logprob_start_len": -1, "image_data": None,
        }  # fmt: skip
        found = chunks(server, "/generate", body)
        texts = [chunk["text"] for chunk in found]
        assert all(after.startswith(before) for before, after in pairwise(texts)), "cumulative"
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in found]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        assert found[-1]["meta_info"]["prompt_tokens"] == len(prompt)
        offline = llm.generate(prompt, SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True))
        assert texts[-1] == offline.text


# ---- vllm bench serve ----


def test_vllm_bench_completions(server: RunningServer) -> None:
    body = {
        "model": "tiny-dense", "prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0,
    }  # fmt: skip
    found = chunks(server, "/v1/completions", body)
    timed = [chunk for chunk in found if chunk["choices"]]
    assert len(timed) <= 12, "an interval for each token at most: finish_reason comes with the last text"
    assert timed[-1]["choices"][0]["finish_reason"] == "length"
    assert [chunk["usage"]["completion_tokens"] for chunk in found if not chunk["choices"]] == [12]


def test_vllm_bench_chat(server: RunningServer) -> None:
    body = {
        "model": "tiny-dense", "max_completion_tokens": 12, "stream": True, "ignore_eos": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
        "stream_options": {"include_usage": True}, "temperature": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    found = chunks(server, "/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in found if chunk["choices"]]
    timed = [delta for delta in deltas if delta.get("content") or delta.get("reasoning")]
    assert [delta for delta in deltas if delta.get("content") == "" and "role" not in delta] == []
    assert 1 <= len(timed) <= 12
    assert deltas[-1] == {}, "the finish chunk is no output"
    assert found[-1]["usage"]["completion_tokens"] == 12
