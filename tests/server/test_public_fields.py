"""Each field of SGLang's and vLLM's bodies is answered as the page of the HTTP API says."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from docs.generators.http import PUBLIC, treatment
from tests.server.in_process import make_app
from tests.server.test_field_table import BODIES, ask

FIELDS = json.loads(PUBLIC.read_text("utf-8"))
ROWS = sorted(
    {
        (place, name)
        for server in ("SGLang", "vLLM")
        for place, names in FIELDS[server].items()
        for name in names.split()
    }
)

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
VALUES: dict[str, Any] = {
    "allowed_token_ids": [5], "bad_words": ["x"], "chat_template_kwargs": {"a": 1}, "data_1": "a",
    "data_2": "b", "documents": ["b"], "encoding_format": "float", "input": "a", "input_embeds": [[0.5]],
    "input_ids": [5], "json_schema": {"type": "object"}, "logit_bias": {"5": 1.0},
    "logprob_token_ids": [5], "messages": [USER], "min_p": 0.1, "model": "tiny-dense", "prompt": "a",
    "queries": "a", "query": "a", "reasoning_effort": "low", "regex": "a", "ebnf": 'root ::= "a"',
    "repetition_penalty": 1.1, "response_format": {"type": "text"}, "sampling_params": {}, "stop": "x",
    "stop_regex": "x", "stop_token_ids": [5], "stream_options": {"include_usage": True},
    "structural_tag": "{}", "structured_outputs": {"regex": "a"}, "suffix": "a", "temperature": 0.5,
    "text": "a", "text_1": "a", "text_2": "b", "token_ids_logprob": [5], "tokens": [5],
    "tool_choice": "auto", "tools": [TOOL], "top_p": 0.5, "truncation_side": "left", "cache_salt": "a",
    "extra_key": "a", "lora_path": "a", "rid": "a", "routing_key": "a",
}  # fmt: skip
"""A value that a body takes; for other fields it is `true` or 1."""
TRUE = (
    "add_generation_prompt", "add_special_tokens", "continue_final_message", "echo", "ignore_eos",
    "include_reasoning", "include_stop_str_in_output", "no_stop_trim", "parallel_tool_calls",
    "return_documents", "return_logprob", "return_prompt_token_ids", "return_text_in_logprobs",
    "return_token_ids", "return_token_strs", "return_tokens_as_token_ids", "separate_reasoning",
    "skip_special_tokens", "stream",
)  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "logprob_token_ids": {"logprobs": 1},
    "top_logprobs_num": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True},
    "token_ids_logprob": {"return_logprob": True},
    "input_ids": {"text": None},
    "input_embeds": {"text": None},
    "data_1": {"text_1": None, "text_2": None, "data_2": "b"},
    "data_2": {"text_1": None, "text_2": None, "data_1": "a"},
    "queries": {"text_1": None, "text_2": None, "documents": "b"},
    "documents": {"text_1": None, "text_2": None, "queries": "a"},
    "messages": {"prompt": None},
    "continue_final_message": {
        "prompt": None,
        "add_generation_prompt": False,
        "messages": [USER, {"role": "assistant", "content": "b"}],
    },
}
"""What a field needs beside it."""
LABELS = ("query", "items", "label_token_ids", "apply_softmax", "item_first")
"""Of /v1/score: they need an answer with log-probabilities. `test_scores` tries them."""


@pytest.fixture(scope="module")
def app() -> Any:
    found = make_app()[0]
    found.state.server.adapters.add(VALUES["lora_path"])
    return found


def accepted_value(place: str, name: str) -> Any:
    if name == "logprobs":
        return True if place == "chat" else 1
    return VALUES.get(name, True if name in TRUE else 1)


@pytest.mark.parametrize(
    ("place", "name"), [row for row in ROWS if row[0] != "score" or row[1] not in LABELS], ids=str
)
def test_a_public_field(app: Any, place: str, name: str) -> None:
    api, _, inner = place.partition(".")
    route, body = copy.deepcopy(BODIES[api])
    target = body[inner] if inner else body
    said = treatment(place, name)
    if said == "accepted":
        target |= {} if place == "rerank" else NEEDS.get(name, {})
        if "logprobs" in target:
            target["logprobs"] = accepted_value(place, "logprobs")
        target[name] = accepted_value(place, name)
    else:
        target[name] = {"a": 1}
    answer = asyncio.run(ask(app, route, body))
    if said == "refused" or name == "suffix":  # a field of OpenAI's, whose values are refused
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("place", "name"),
    [("chat", "use_beam_search"), ("completions", "use_beam_search"), ("generate", "beam_width")],
)
def test_beam_search_is_refused_by_name(app: Any, place: str, name: str) -> None:
    route, body = copy.deepcopy(BODIES[place])
    (body["sampling_params"] if place == "generate" else body)[name] = True
    error = asyncio.run(ask(app, route, body)).json()["error"]
    assert "beam search is not supported" in error["message"]
    assert error["param"].endswith(name)
