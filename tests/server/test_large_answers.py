"""Valid requests with large answers: none holds up the event loop, and large answers are right."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from diptych.shared.server.api.generation import MAX_INPUT_LOGPROBS, MAX_TAKEN
from diptych.shared.server.api.long_answers import PIECE_VALUES, num_values, written
from diptych.shared.server.engine.engine_client import Delta, Live
from diptych.shared.server.engine.messages import (
    MAX_LOGPROBS,
    Finish,
    Generate,
    Outputs,
    RequestOutput,
    in_messages,
    num_logprobs,
)
from diptych.shared.types import TokenLogprob
from tests.properties import given, settings, st
from tests.server import in_process
from tests.server.in_process import FakeClient, Lag, make_app
from tests.server.test_bodies import CHAT, COMPLETIONS, MAX_LAG, RESPONSES, ask

TOP = tuple((i + 5, -1.2345678) for i in range(20))
STEP = 1000
"""Tokens of a delta: as when the event loop was late."""


class Generous(FakeClient):
    """Gives at once all that was asked for."""

    def generate(self, message: Generate, live: Live) -> None:
        params = message.params
        if message.is_pooling:
            live.deliver(Delta(finish=Finish(kind="stop"), embedding=[0.1234567] * 1024))
            return
        token = TokenLogprob(5, -1.5, TOP[: params.top_logprobs_num])
        has_input = params.return_logprob and params.logprob_start_len >= 0
        given = [token._replace(logprob=None, top=()), *[token] * (len(message.input_ids) - 1)]
        for start in range(0, params.max_new_tokens, STEP):
            number = min(STEP, params.max_new_tokens - start)
            delta = Delta(token_ids=[5] * number, text="ä" * number, logprobs=[token] * number)
            if not params.return_logprob:
                delta.logprobs = []
            if start == 0 and has_input:
                delta.input_logprobs = given
            if start + number == params.max_new_tokens:
                delta.finish = Finish(kind="length", length=params.max_new_tokens)
            live.deliver(delta)


USER = [{"role": "user", "content": "a"}]
NATIVE = {"return_logprob": True, "top_logprobs_num": 20}
LARGE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [5] * 10_000, "max_tokens": 1, "echo": True, "logprobs": 5}),
    (RESPONSES, {"input": "a", "max_output_tokens": 2000, "top_logprobs": 20,
                 "include": ["message.output_text.logprobs"], "stream": True}),
    ("/generate", {**NATIVE, "input_ids": [5] * 8000, "logprob_start_len": 0}),
    (CHAT, {"messages": USER, "max_tokens": 1500, "logprobs": True, "top_logprobs": 20, "n": 2}),
    ("/v1/embeddings", {"input": ["a"] * 128}),
]  # fmt: skip
LARGER: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [5] * 120_000, "max_tokens": 1, "echo": True, "n": 64}),
    (COMPLETIONS, {"prompt": [5] * 40_000, "max_tokens": 1, "prompt_logprobs": 20}),
    (COMPLETIONS, {"prompt": [5] * 120_000, "max_tokens": 1, "return_token_ids": True, "n": 64}),
    (COMPLETIONS, {"prompt": [5] * 120_000, "max_tokens": 1, "return_token_ids": True, "n": 64,
                   "stream": True}),
    (COMPLETIONS, {"prompt": [5], "max_tokens": 4000, "logprobs": 20, "n": 8, "stream": True}),
    (COMPLETIONS, {"prompt": [[5] * 1000] * 1000, "max_tokens": 1}),
    (CHAT, {"messages": USER, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20, "n": 8}),
    (CHAT, {"messages": USER, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20, "n": 8,
            "stream": True}),
    ("/generate", {**NATIVE, "input_ids": [5], "sampling_params": {"max_new_tokens": 4000, "n": 8}}),
    ("/generate", {**NATIVE, "input_ids": [5], "sampling_params": {"max_new_tokens": 2000, "n": 4},
                   "stream": True}),
    ("/generate", {"input_ids": [[5] * 120_000] * 8, "return_prompt_token_ids": True}),
    ("/tokenize", {"prompt": "a[1] " * 100_000, "return_token_strs": True}),
    ("/tokenize", {"prompt": ["a[1] " * 200] * 2000}),
    ("/detokenize", {"tokens": [[5] * 400] * 2048}),
    ("/v1/embeddings", {"input": ["a"] * 2048}),
    ("/v1/rerank", {"query": "a", "documents": ["b" * 1000] * 2000}),
]  # fmt: skip


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "FakeClient", Generous)
        made, _ = make_app(max_live_requests=4096)
    gc.collect()
    gc.freeze()  # as a server does at its start
    yield made
    gc.unfreeze()


@pytest.mark.parametrize(
    ("path", "body"), [*LARGE, *(pytest.param(*each, marks=pytest.mark.full) for each in LARGER)]
)
def test_no_answer_holds_up_the_others(app: Any, path: str, body: dict[str, Any]) -> None:
    data, lag = json.dumps(body).encode(), Lag()
    answer = asyncio.run(ask(app, path, data, lag))
    assert answer.status_code == 200, answer.text[:500]
    assert lag.longest < MAX_LAG


def test_log_probabilities_of_prompts_have_a_limit(app: Any) -> None:
    """They are in memory, of each sample."""
    for path, body in (
        (COMPLETIONS, {"prompt": [5] * 50_000, "max_tokens": 1, "prompt_logprobs": 20}),
        (COMPLETIONS, {"prompt": [5] * 5000, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 256}),
        ("/generate", {**NATIVE, "input_ids": [[5] * 10_000] * 6, "logprob_start_len": 0}),
    ):
        answer = asyncio.run(ask(app, path, json.dumps(body).encode()))
        assert answer.status_code == 400
        assert f"at most {MAX_INPUT_LOGPROBS} log-prob" in answer.json()["error"]["message"]


def test_a_stream_in_pieces_is_the_whole_answer(app: Any) -> None:
    body = {"messages": USER, "max_tokens": 1500, "logprobs": True, "top_logprobs": 20, "n": 2}
    whole = asyncio.run(ask(app, CHAT, json.dumps(body).encode())).json()
    stream = asyncio.run(ask(app, CHAT, json.dumps({**body, "stream": True}).encode())).text
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line and line != "data: [DONE]"]
    for choice in whole["choices"]:
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        entries = [entry for each in own for entry in (each["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert len(entries) == 1500
        assert max(len((each["logprobs"] or {"content": []})["content"]) for each in own) * 21 <= MAX_TAKEN
        text = "".join(each["delta"].get("content") or "" for each in own)
        assert text == choice["message"]["content"] == "ä" * 1500
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]
    assert whole["usage"]["completion_tokens"] == 3000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.lists(VALUES), st.integers(1, 12))
@settings(max_examples=40)
def test_pieces_are_the_json_of_the_whole(value: list[Any], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diptych.shared.server.api.long_answers.PIECE_VALUES", most)
        assert json.loads(written(value)) == value


def test_no_piece_is_large() -> None:
    entry = {"token": "a", "top_logprobs": [{"token": "a", "bytes": (97,), "logprob": -1.0}] * 20}
    sizes: list[int] = []

    def encode(value: Any) -> bytes:
        sizes.append(num_values(value, 10**9))
        return json.dumps(value).encode()

    value = {"choices": [{"content": [entry] * 900, "text": "a" * 100}] * 2, "ids": list(range(20_000))}
    assert json.loads(written(value, encode)) == json.loads(json.dumps(value))
    assert max(sizes) <= PIECE_VALUES + num_values(entry)
    assert sum(sizes) >= num_values(value, 10**9)


def output_of(rid: str, num_input: int, num_output: int) -> RequestOutput:
    def tokens(number: int) -> list[TokenLogprob]:
        return [TokenLogprob(i, -1.0, TOP) for i in range(number)]

    return RequestOutput(
        rid=rid, new_token_ids=list(range(num_output)), finish=Finish(kind="stop"), queue_time=1.0,
        output_logprobs=tokens(num_output), input_logprobs=tokens(num_input), num_cached_tokens=3,
        num_accepted_tokens=0,
    )  # fmt: skip


def test_messages_of_a_step_have_few_log_probabilities() -> None:
    outputs = [output_of("a", 5000, 2), output_of("b", 0, 5), output_of("c", 1600, 1)]
    messages = list(in_messages(outputs))
    assert len(messages) > 1
    found: dict[str, Delta] = {}
    for message in messages:
        total = sum(num_logprobs(each.input_logprobs + each.output_logprobs) for each in message.outputs)
        assert total <= MAX_LOGPROBS
        for each in message.outputs:
            delta = Delta(
                token_ids=each.new_token_ids, logprobs=each.output_logprobs, finish=each.finish,
                input_logprobs=each.input_logprobs, num_cached_tokens=each.num_cached_tokens,
            )  # fmt: skip
            if each.rid in found:
                assert found[each.rid].is_incomplete, "what comes first is no token"
                found[each.rid].merge(delta)
            else:
                found[each.rid] = delta
    for each in outputs:
        merged = found[each.rid]
        assert not merged.is_incomplete
        assert merged.input_logprobs == each.input_logprobs
        assert (merged.token_ids, merged.finish) == (each.new_token_ids, each.finish)
    plain = [replace_logprobs(each) for each in outputs]
    assert list(in_messages(plain)) == [Outputs(outputs=plain)]


def replace_logprobs(output: RequestOutput) -> RequestOutput:
    fields = {name: getattr(output, name) for name in output.__struct_fields__}
    return RequestOutput(**{**fields, "input_logprobs": [], "output_logprobs": []})


def test_parts_of_a_delta_are_the_delta() -> None:
    whole = Delta(
        text="abc", token_ids=[1, 2, 3], logprobs=[TokenLogprob(i, -1.0) for i in (1, 2, 3)],
        input_logprobs=[TokenLogprob(9, None)], finish=Finish(kind="stop"), queue_time=0.5,
    )  # fmt: skip
    for number in (1, 2, 3):
        merged, rest = replace(whole).split(number)
        while rest is not None:
            part, rest = rest.split(number)
            assert part.queue_time is None
            merged.merge(part)
        assert merged == whole
