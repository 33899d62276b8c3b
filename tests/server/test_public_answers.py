"""What the test suites of SGLang and vLLM assert of the API, in our words: each with a real server."""

from __future__ import annotations

import threading
import time
import urllib.request
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from tests.server.running import RunningServer, at_once
from tests.server.test_faults import SUM, post
from tests.server.test_text import events
from tests.server.test_text import post as post_bytes

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
GREEDY = {"temperature": 0}
LONG = {"max_new_tokens": 1800, "ignore_eos": True}


def good(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    status, answer = post(server, path, body)
    assert status == 200, answer
    return answer


def refused(server: RunningServer, path: str, body: dict[str, Any], param: str) -> str:
    status, answer = post(server, path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    message: str = answer["error"]["message"]
    return message


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-dense", max_total_tokens=2048)


@pytest.fixture(scope="module")
def ids(llm: LLM) -> list[int]:
    found: list[int] = llm.tokenizer.encode("Otto is a baker. Otto")
    return found


# ---- where an answer ends ----


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_kept_stop_text_is_the_end_of_the_answer(server: RunningServer, name: str) -> None:
    """Every stop text of one or two characters, at any place of its token."""
    body = {"prompt": "Otto is a baker. Otto", "max_tokens": 24, "ignore_eos": True, **GREEDY}
    body["skip_special_tokens"] = False  # a stop text may contain one
    text = good(server, COMPLETIONS, body)["choices"][0]["text"]

    def check(stop: str) -> None:
        choice = good(server, COMPLETIONS, {**body, "stop": stop, name: True})["choices"][0]
        assert choice["text"] == text[: text.index(stop) + len(stop)]
        asked = {**body, "stop": stop, name: True, "stream": True}
        chunks = events(post_bytes(server, COMPLETIONS, asked))
        assert "".join(each["text"] for c in chunks for each in c["choices"]) == choice["text"]

    at_once(check, {text[start : start + n] for start in range(0, len(text) - 2, 11) for n in (1, 2)})


def test_matched_stop_is_null_at_the_greatest_length(server: RunningServer) -> None:
    chat = good(server, CHAT, {"messages": SUM, "max_tokens": 2})["choices"][0]
    text = good(server, COMPLETIONS, {"prompt": "a", "max_tokens": 2, "ignore_eos": True})["choices"][0]
    for choice in (chat, text):
        assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)


def test_an_aborted_native_request_keeps_its_tokens(server: RunningServer) -> None:
    answers: list[Any] = []
    body = {"text": "Count:", "rid": "aborted", "sampling_params": LONG}
    thread = threading.Thread(target=lambda: answers.append(good(server, NATIVE, body)))
    thread.start()
    time.sleep(0.5)
    while not post(server, "/abort_request", {"rid": "aborted"})[1]["num_aborted"]:
        time.sleep(0.05)
    thread.join(30)
    meta = answers[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["finish_reason"]["message"]
    assert 0 < meta["completion_tokens"] == len(answers[0]["output_ids"]) < 1800
    assert answers[0]["text"]


def test_two_live_requests_have_different_ids(server: RunningServer) -> None:
    body = {"text": "a", "rid": "twice", "sampling_params": LONG}
    thread = threading.Thread(target=lambda: post(server, NATIVE, body))
    thread.start()
    time.sleep(0.3)
    assert "has not ended" in refused(server, NATIVE, body, "rid")
    assert "has not ended" in refused(server, CHAT, {"messages": SUM, "rid": "twice"}, "rid")
    post(server, "/abort_request", {"rid": "twice"})
    thread.join(30)
    body["sampling_params"] = {"max_new_tokens": 1}
    assert good(server, NATIVE, body)["meta_info"]["id"] == "twice"
    refused(server, NATIVE, {**body, "rid": ""}, "rid")


def test_a_demanded_call_that_is_cut_shows_no_markup(server: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        body = {"messages": SUM, "tools": tools, "tool_choice": choice, **GREEDY}

        def check(max_tokens: int, body: dict[str, Any] = body) -> None:
            found = good(server, CHAT, {**body, "max_tokens": max_tokens})["choices"][0]
            assert found["finish_reason"] == "length"
            assert not found["message"]["content"]

        at_once(check, (1, 2, 4, 8, 16))


# ---- lists of /generate ----


def test_each_prompt_of_a_list_has_its_own_options(server: RunningServer, llm: LLM) -> None:
    texts = ["Otto is a", "Mara lives in", "one two"]
    body: dict[str, Any] = {
        "text": texts,
        "sampling_params": [{"max_new_tokens": n, "ignore_eos": True, **GREEDY} for n in (3, 5, 0)],
        "rid": ["x", "y", "z"],
        "return_logprob": [False, True, True],
        "logprob_start_len": [-1, 0, 0],
        "top_logprobs_num": [0, 2, 0],
    }
    found = good(server, NATIVE, body)
    alone = [
        good(server, NATIVE, {"text": text, "sampling_params": params})
        for text, params in zip(texts, body["sampling_params"])
    ]
    assert [each["output_ids"] for each in found] == [each["output_ids"] for each in alone]
    assert [each["meta_info"]["id"] for each in found] == ["x", "y", "z"]
    assert [each["index"] for each in found] == [0, 1, 2]
    assert "output_token_logprobs" not in found[0]["meta_info"]
    assert [len(each) for each in found[1]["meta_info"]["output_top_logprobs"]] == [2] * 5
    assert len(found[2]["meta_info"]["input_token_logprobs"]) == len(llm.tokenizer.encode("one two"))
    as_ids = {"text": None, "input_ids": [llm.tokenizer.encode(text) for text in texts]}
    again = good(server, NATIVE, {**body, **as_ids})
    assert [each["output_ids"] for each in again] == [each["output_ids"] for each in found]
    assert len(good(server, NATIVE, {"text": ["a"], "sampling_params": {"max_new_tokens": 1, "n": 2}})) == 2
    assert len(good(server, NATIVE, {"text": ["a"], "sampling_params": {"max_new_tokens": 1}})) == 1
    chunks = events(post_bytes(server, NATIVE, {**body, "stream": True}))
    last = {chunk["index"]: chunk["output_ids"] for chunk in chunks}
    assert [last[i] for i in range(3)] == [each["output_ids"] for each in found]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"rid": ["a"]}, "rid"),
        ({"rid": ["a", "a"]}, "rid"),
        ({"return_logprob": [True]}, "return_logprob"),
        ({"sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": []}, "text"),
        ({"token_ids_logprob": [[5]], "return_logprob": True}, "token_ids_logprob"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit(server: RunningServer, more: dict[str, Any], param: str) -> None:
    refused(server, NATIVE, {"text": ["a", "b"], **more}, param)


def test_a_bias_of_the_native_route(server: RunningServer) -> None:
    params = {"max_new_tokens": 3, "ignore_eos": True, **GREEDY}
    first = good(server, NATIVE, {"text": "a", "sampling_params": params})["output_ids"][0]
    biased = {**params, "logit_bias": {str(first): -100}}
    other = good(server, NATIVE, {"text": "a", "sampling_params": biased})
    assert first not in other["output_ids"]
    for wrong in ({"x": 1}, {"5": 101}):
        body = {"text": "a", "sampling_params": {"logit_bias": wrong}}
        refused(server, NATIVE, body, "sampling_params.logit_bias")


# ---- tokens and their log-probabilities ----


def test_named_tokens_have_log_probabilities(server: RunningServer, llm: LLM, ids: list[int]) -> None:
    body = {
        "input_ids": ids,
        "return_logprob": True,
        "top_logprobs_num": 1,
        "logprob_start_len": 0,
        "token_ids_logprob": [7, 3],
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, **GREEDY},
    }
    answer = good(server, NATIVE, body)
    everything = llm.generate(
        ids, max_tokens=4, temperature=0, ignore_eos=True, return_logprob=True, logprob_start_len=0,
        top_logprobs_num=llm.tokenizer.vocab_size, progress=False,
    )  # fmt: skip
    assert answer["prompt_token_ids"] == ids
    meta = answer["meta_info"]
    assert meta["input_token_ids_logprobs"][0] is None
    for kind, entries in (("output", everything.output_logprobs), ("input", everything.input_logprobs)):
        for found, entry in zip(meta[f"{kind}_token_ids_logprobs"], entries):
            values = dict(entry.top)
            if found is not None:
                assert [each[1] for each in found] == [7, 3]
                assert [each[0] for each in found] == pytest.approx([values[7], values[3]], abs=1e-3)
                assert all(isinstance(each[2], str) for each in found)
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == answer["text"]
    chat = {"messages": SUM, "logprobs": True, "logprob_token_ids": [7, 3], "max_tokens": 1}
    content = good(server, CHAT, chat)["choices"][0]["logprobs"]["content"]
    assert len(content[0]["top_logprobs"]) == 2
    refused(server, CHAT, {"messages": SUM, "logprob_token_ids": [7]}, "logprob_token_ids")
    refused(server, CHAT, {**chat, "logprob_token_ids": [10**6]}, "logprob_token_ids")


def test_log_probabilities_of_the_prompt(server: RunningServer, llm: LLM, ids: list[int]) -> None:
    plain = llm.generate(
        ids, max_tokens=0, return_logprob=True, logprob_start_len=0, top_logprobs_num=3, progress=False
    )
    assert any(expected.rank is not None and expected.rank > 3 for expected in plain.input_logprobs)
    choice = good(server, COMPLETIONS, {"prompt": ids, "max_tokens": 2, "prompt_logprobs": 2})["choices"][0]
    found = choice["prompt_logprobs"]
    assert found[0] is None
    assert choice["logprobs"] is None
    for entry, expected in zip(found[1:], plain.input_logprobs[1:]):
        assert entry[str(expected.token_id)]["logprob"] == pytest.approx(expected.logprob, abs=1e-3)
        assert entry[str(expected.token_id)]["rank"] == expected.rank
        best, _ = expected.top[0]
        assert entry[str(best)]["rank"] == 1
        assert 2 <= len(entry) <= 3
    asked = {"messages": SUM, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    chat = good(server, CHAT, asked)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    body = {"prompt": ids, "prompt_logprobs": 1, "stream": True}
    assert "stream" in refused(server, COMPLETIONS, body, "prompt_logprobs")


def test_token_ids_of_prompt_and_answer(server: RunningServer, llm: LLM) -> None:
    body = {"messages": SUM, "return_token_ids": True, **GREEDY}
    whole = good(server, CHAT, body)
    choice = whole["choices"][0]
    assert whole["prompt_token_ids"] == llm.tokenizer.chat(SUM)
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    text = llm.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert text == choice["message"]["content"]
    chunks = events(post_bytes(server, CHAT, {**body, "stream": True}))
    assert [chunk.get("prompt_token_ids") for chunk in chunks][:2] == [whole["prompt_token_ids"], None]
    pieces = [each.get("token_ids", []) for chunk in chunks for each in chunk["choices"]]
    assert [token_id for piece in pieces for token_id in piece] == choice["token_ids"]
    assert "prompt_token_ids" in good(server, CHAT, {"messages": SUM, "return_prompt_token_ids": True})
    text_choice = good(server, COMPLETIONS, {"prompt": "a", "return_token_ids": True})["choices"][0]
    assert text_choice["prompt_token_ids"] == llm.tokenizer.encode("a")


def test_tokens_that_are_allowed_and_words_that_are_not(server: RunningServer) -> None:
    body = {"messages": SUM, "max_tokens": 12, **GREEDY}
    assert "42" in good(server, CHAT, body)["choices"][0]["message"]["content"]
    assert "42" not in good(server, CHAT, {**body, "bad_words": ["42"]})["choices"][0]["message"]["content"]
    limited = {**body, "allowed_token_ids": [9, 11], "return_token_ids": True}
    assert set(good(server, CHAT, limited)["choices"][0]["token_ids"]) <= {9, 11}
    native = {"text": "a", "sampling_params": {"allowed_token_ids": [9], "max_new_tokens": 3}}
    assert good(server, NATIVE, native)["output_ids"] == [9, 9, 9]
    refused(server, CHAT, {**body, "allowed_token_ids": [10**6]}, "allowed_token_ids")
    refused(server, CHAT, {**body, "bad_words": [""]}, "bad_words")


# ---- prompts ----


def test_prompts_are_cut_to_their_length(server: RunningServer) -> None:
    prompt = list(range(10, 40))
    for more, kept in (
        ({"truncate_prompt_tokens": 5}, prompt[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, prompt[:5]),
        ({"truncate_prompt_tokens": 50}, prompt),
    ):
        body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, **more}
        assert good(server, COMPLETIONS, body)["choices"][0]["prompt_token_ids"] == kept
    long = {"prompt": [10] * 5000, "max_tokens": 8, "truncate_prompt_tokens": -1}
    assert good(server, COMPLETIONS, long)["usage"]["prompt_tokens"] == 2048 - 8
    chat = {"messages": SUM, "max_tokens": 1, "truncate_prompt_tokens": 4}
    assert good(server, CHAT, chat)["usage"]["prompt_tokens"] == 4
    vectors = good(server, "/v1/embeddings", {"input": prompt, "truncate_prompt_tokens": 3})
    assert vectors["usage"]["prompt_tokens"] == 3


def test_a_prompt_that_is_too_long_has_one_code(server: RunningServer) -> None:
    """Counted in characters, before it is tokenized, or in tokens."""
    for text in ("a" * 10**6, "one two three " * 3000):
        for path, body in (
            (COMPLETIONS, {"prompt": text}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            (NATIVE, {"text": text}),
            ("/v1/embeddings", {"input": text}),
        ):
            status, answer = post(server, path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_the_template_leaves_the_answer_closed(server: RunningServer, llm: LLM) -> None:
    body = {"messages": SUM, "max_tokens": 1, "return_token_ids": True, "add_generation_prompt": False}
    closed = llm.tokenizer.chat(SUM, add_generation_prompt=False)
    assert good(server, CHAT, body)["prompt_token_ids"] == closed


def test_echo_repeats_the_last_answer(server: RunningServer) -> None:
    messages = [*SUM, {"role": "assistant", "content": "It is "}]
    body = {"messages": messages, "max_tokens": 3, "echo": True}
    assert good(server, CHAT, body)["choices"][0]["message"]["content"].startswith("It is ")
    plain = good(server, CHAT, {"messages": SUM, "echo": True, **GREEDY})
    assert plain["choices"][0]["message"]["content"] == "12 + 30 = 42"


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


def test_tokens_and_text_of_a_conversation_are_those_of_chat(server: RunningServer) -> None:
    body = {"messages": SUM, "tools": TOOLS}
    found = good(server, "/tokenize", {**body, "return_token_strs": True})
    asked = good(server, CHAT, {**body, "max_tokens": 1, "return_token_ids": True})
    assert found["tokens"] == asked["prompt_token_ids"]
    assert found["count"] == len(found["token_strs"])
    text = good(server, "/apply-template", body)["prompt"]
    again = good(server, "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert again["tokens"] == found["tokens"]
    several = good(server, "/tokenize", {"prompt": ["a", "b c"]})
    assert several["count"] == [len(each) for each in several["tokens"]]
    texts = good(server, "/detokenize", {"tokens": several["tokens"], "skip_special_tokens": True})["text"]
    assert texts == ["a", "b c"]
    refused(server, "/apply-template", {}, "messages")
    wrong = {**body, "chat_template_kwargs": {"chat_template": "x"}}
    refused(server, "/tokenize", wrong, "chat_template_kwargs")


# ---- small ones ----


def test_options_of_streams_belong_to_streams(server: RunningServer) -> None:
    options = {"stream_options": {"include_usage": True}}
    assert "stream=true" in refused(server, CHAT, {"messages": SUM, **options}, "stream_options")
    assert good(server, CHAT, {"messages": SUM, "max_tokens": 1, "stream_options": {}})["usage"]


def test_false_is_no_number_of_log_probabilities(server: RunningServer) -> None:
    assert good(server, COMPLETIONS, {"prompt": "a", "logprobs": False})["choices"][0]["logprobs"] is None
    refused(server, COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs")


def test_versions_models_and_load(server: RunningServer) -> None:
    version = server.get("/version")["version"]
    assert server.get("/server_info")["version"] == version
    model = server.get("/v1/models")["data"][0]
    assert model["root"] == model["id"] == "tiny-dense"
    load = server.get("/load")
    assert load["server_load"] == server.get("/get_load")["server_load"] == 0
    prints = {good(server, path, body)["system_fingerprint"] for path, body in (
        (CHAT, {"messages": SUM, "max_tokens": 1}), (COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    )}  # fmt: skip
    assert len(prints) == 1
    assert prints.pop().startswith("fp_")


def test_the_probe_generates(server: RunningServer) -> None:
    with urllib.request.urlopen(f"{server.url}/health_generate", timeout=30) as answer:
        assert (answer.status, answer.read()) == (200, b"ok")
    server.wait_idle()
