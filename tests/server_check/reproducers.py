"""Small reproducers of bugs of other servers, for their maintainers: requests, what is expected, what comes.

python -m tests.server_check.reproducers URL --server llama.cpp [--name NAME] prints each as the text of a
report, with a curl command for each request. --version TEXT and --record write the sample that the page of
bugs shows. The model is that of `tests.server_check.tool_model`.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

JSON = dict[str, Any]
FILE = Path(__file__).parents[2] / "docs" / "samples" / "servers" / "reproducers.json"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 12 + 30?"}]
F: JSON = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
STRICT = {**F, "function": {**F["function"], "strict": False}}
NAMED = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}


@dataclass(frozen=True)
class Answer:
    """`body`: JSON, or a text that is none. `text`: the raw response."""

    status: int
    body: Any
    text: str

    @property
    def message(self) -> JSON:
        is_whole = self.status == 200 and isinstance(self.body, dict)  # a stream is not read
        found: JSON = self.body["choices"][0]["message"] if is_whole else {}
        return found

    @property
    def content(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def num_prompt(self) -> int:
        return int(self.body["usage"]["prompt_tokens"]) if self.message else -1

    @property
    def short(self) -> str:
        if not self.message:
            return f"status {self.status}: {self.text[-300:]}"
        calls = [each["function"]["name"] for each in self.message.get("tool_calls") or ()]
        what = f"calls of {calls}" if calls else repr(self.content[:120])
        return f"status 200, {self.num_prompt} prompt tokens, {what}"


@dataclass(frozen=True)
class Reproducer:
    """`bodies`: of requests in order; messages and max_tokens are added. `is_seen`: whether the answers show
    the bug."""

    name: str
    request: str
    expected: str
    got: str
    bodies: tuple[JSON, ...]
    is_seen: Callable[[list[Answer]], bool]


def schema(value: JSON) -> JSON:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


def no_call(answers: list[Answer]) -> bool:
    return answers[0].status == 200 and not answers[0].message.get("tool_calls")


def accepted(answers: list[Answer]) -> bool:
    return answers[0].status == 200


def other_prompts(answers: list[Answer]) -> bool:
    """Requests that mean the same have prompts of other lengths."""
    return len({each.num_prompt for each in answers}) > 1


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


MARKER = {"messages": [{"role": "user", "content": "a <|im_end|> b"}], "max_tokens": 1}
BROKEN = {"messages": [{"role": "user", "content": "a <|im_end |> b"}], "max_tokens": 1}
COMMON = (
    Reproducer(
        "required-without-tools",
        '`"tool_choice": "required"` without tools',
        "status 400",
        "status 200",
        ({"tool_choice": "required"},),
        accepted,
    ),
    Reproducer(
        "named-call",
        "`tool_choice` names the tool `f`",
        "a call of `f`",
        "text",
        ({"tools": [F], "tool_choice": NAMED},),
        no_call,
    ),
    Reproducer(
        "marker-in-message",
        "the message `a <|im_end|> b`, beside one with `<|im_end |>`",
        "as many prompt tokens, or more: the marker is text",
        "fewer: the marker is a control token, so a message can end the user's turn",
        (MARKER, BROKEN),
        lambda a: 0 < a[0].num_prompt < a[1].num_prompt,
    ),
    Reproducer(
        "parts-of-content",
        'content as two parts, `"What is"` and `" 12 + 30?"`, beside their text',
        "the same prompt",
        "a newline between the parts",
        ({"messages": [{"role": "user", "content": PARTS}]}, {}),
        other_prompts,
    ),
)
LLAMA = (
    *COMMON,
    Reproducer(
        "required-call",
        '`"tool_choice": "required"` and a tool, temperature 1',
        "a call",
        "text: the grammar does not bind",
        ({"tools": [F], "tool_choice": "required", "temperature": 1.0, "seed": 0},),
        no_call,
    ),
    Reproducer(
        "unknown-tool-named",
        "`tool_choice` names a tool that is not in `tools`",
        "status 400",
        "status 200",
        ({"tools": [F], "tool_choice": OTHER},),
        accepted,
    ),
    Reproducer(
        "default-thinking",
        "no `chat_template_kwargs`, beside `enable_thinking` true, the template's default",
        "the same prompt",
        "the prompt of thinking off",
        ({}, {"chat_template_kwargs": {"enable_thinking": True}}),
        other_prompts,
    ),
    Reproducer(
        "multiple-of",
        'schema `{"type": "integer", "multipleOf": 7}` with bounds 1 and 98',
        "a multiple, or status 400",
        "another integer",
        (schema({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 98}),),
        lambda a: a[0].status == 200 and int(a[0].content) % 7 != 0,
    ),
    Reproducer(
        "not",
        'schema `{"enum": ["a"], "not": {"const": "a"}}`',
        "status 400: no value is valid",
        '`"a"`',
        (schema({"enum": ["a"], "not": {"const": "a"}}),),
        accepted,
    ),
    Reproducer(
        "required-undeclared",
        "a property that is required and not declared",
        "it is in the object, or status 400",
        "an object without it",
        (
            schema(
                {
                    "type": "object",
                    "properties": {"a": {"type": "integer", "maximum": 9}},
                    "required": ["a", "b"],
                }
            ),
        ),
        lambda a: a[0].status == 200 and is_json(a[0].content) and "b" not in json.loads(a[0].content),
    ),
    Reproducer(
        "enum-of-other-type",
        'schema `{"type": "string", "enum": [1]}`',
        "status 400: no value is valid",
        "`1`",
        (schema({"type": "string", "enum": [1]}),),
        accepted,
    ),
    Reproducer(
        "bounds-beside-any-of",
        'schema `{"anyOf": [{"type": "integer", "maximum": 9}], "minimum": 10}`',
        "status 400: no value is valid",
        "an integer of at most 9",
        (schema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}], "minimum": 10}),),
        accepted,
    ),
    Reproducer(
        "quote-in-pattern",
        r'schema `{"type": "string", "pattern": "^\"[ab]$"}`',
        "JSON, or status 400",
        "status 500",
        (schema({"type": "string", "pattern": '^"[ab]$'}),),
        lambda a: a[0].status >= 500,
    ),
    Reproducer(
        "unknown-field",
        '`"presence_penalti": 1.5`',
        "status 400",
        "status 200",
        ({"presence_penalti": 1.5},),
        accepted,
    ),
    Reproducer(
        "stop-of-wrong-type",
        '`"stop": {"a": 1}`',
        "status 400",
        "status 200: the field is ignored",
        ({"stop": {"a": 1}},),
        accepted,
    ),
)
TRANSFORMERS = (
    *COMMON,
    Reproducer(
        "logit-bias",
        '`"logit_bias": {"16": -100}`',
        "token 16 does not come",
        "status 500",
        ({"logit_bias": {"16": -100}},),
        lambda a: a[0].status >= 500,
    ),
    Reproducer(
        "text-beside-a-call",
        "a call with text beside it in the history, and the same without text",
        "a longer prompt with the text",
        "the same prompt: the text is missing",
        tuple(
            {
                "messages": [
                    *QUESTION,
                    {"role": "assistant", "content": text, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
                ],
                "tools": [F],
            }
            for text in ("I will ask the tool.", "")
        ),
        lambda a: a[0].num_prompt == a[1].num_prompt > 0,
    ),
    Reproducer(
        "schema-ignored",
        "`response_format` with a JSON schema",
        "JSON, or status 400",
        "any text",
        (schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),),
        lambda a: a[0].status == 200 and not is_json(a[0].content),
    ),
    Reproducer(
        "no-done",
        '`"stream": true`',
        "the last event is `[DONE]`",
        "the last event is a chunk",
        ({"stream": True},),
        lambda a: a[0].status == 200 and "[DONE]" not in a[0].text,
    ),
    Reproducer(
        "form-of-errors",
        "an unknown field",
        "an error with `error.message`",
        "an error with `detail`",
        ({"presence_penalti": 1.5},),
        lambda a: isinstance(a[0].body, dict) and "detail" in a[0].body,
    ),
    Reproducer(
        "wrong-type",
        '`"temperature": "hot"`',
        "status 400",
        "status 500",
        ({"temperature": "hot"},),
        lambda a: a[0].status >= 500,
    ),
)
SHARED = ("marker-in-message", "parts-of-content", "not", "required-undeclared", "enum-of-other-type",
          "bounds-beside-any-of")  # fmt: skip
VLLM = (
    *(each for each in LLAMA if each.name in SHARED),
    Reproducer(
        "quote-in-pattern",
        r'schema `{"type": "string", "pattern": "^\"[ab]$"}`',
        "JSON, or status 400",
        '`""a"`, which is no JSON',
        (schema({"type": "string", "pattern": '^"[ab]$'}),),
        lambda a: a[0].status == 200 and not is_json(a[0].content),
    ),
)


def is_outside(answers: list[Answer]) -> bool:
    """The arguments of a whole call of `f` are not {"n": an integer}."""
    calls = answers[0].message.get("tool_calls")
    if not calls or answers[0].body["choices"][0].get("finish_reason") == "length":
        return False
    text = calls[0]["function"]["arguments"]
    value = json.loads(text) if is_json(text) else None
    return not isinstance(value, dict) or type(value.get("n")) is not int


SGLANG = (
    *(each for each in LLAMA if each.name in (*SHARED, "multiple-of")),
    VLLM[-1],
    Reproducer(
        "arguments-without-strict", "`tool_choice` names `f`, whose schema requires an integer `n`",
        "arguments with it", 'arguments without it: the schema binds only with `"strict": true`',
        ({"tools": [F], "tool_choice": NAMED, "max_tokens": 120},), is_outside,
    ),
    Reproducer(
        "strict-in-prompt", 'a tool, beside the same one with `"strict": false`',
        "the second prompt is longer: the template shows a tool as it was sent",
        'the same prompt: `"strict": false` is added to the first',
        ({"tools": [F], "max_tokens": 1}, {"tools": [STRICT], "max_tokens": 1}),
        lambda a: a[0].num_prompt == a[1].num_prompt > 0,
    ),
    Reproducer(
        "form-of-errors", "`tool_choice` names a tool that is not in `tools`",
        "an error with `error.message`", "an error with `message`", ({"tools": [F], "tool_choice": OTHER},),
        lambda a: isinstance(a[0].body, dict) and a[0].status == 400 and "error" not in a[0].body,
    ),
)  # fmt: skip
SERVERS = {"llama.cpp": LLAMA, "transformers serve": TRANSFORMERS, "vLLM": VLLM, "SGLang": SGLANG}


def whole(body: JSON, model: str) -> JSON:
    return {"model": model, "messages": QUESTION, "temperature": 0.0, "max_tokens": 32, **body}


def ask(http: httpx.Client, body: JSON) -> Answer:
    """Each request has a connection of its own: some servers close those that they announced to keep."""
    response = http.post("/v1/chat/completions", json=body, headers={"Connection": "close"})
    return Answer(response.status_code, response.json() if is_json(response.text) else None, response.text)


def report(each: Reproducer, bodies: list[JSON], answers: list[Answer], version: str) -> str:
    """The text of a report in words of this project."""
    lines = [f"## {each.name}: {'seen' if each.is_seen(answers) else 'NOT SEEN'}", "", f"Server: {version}"]
    for body, answer in zip(bodies, answers):
        command = ["curl", "-s", "URL/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
        lines += ["", shlex.join([*command, json.dumps(body)]), f"Answer: {answer.short}"]
    return "\n".join([*lines, "", f"Expected: {each.expected}", f"Got: {each.got}", ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--server", choices=SERVERS, required=True)
    parser.add_argument("--name", action="append")
    parser.add_argument("--model", default="", help="In requests. Default: the first that the server lists.")
    parser.add_argument("--version", default="")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with httpx.Client(base_url=arguments.url, timeout=300.0, trust_env=False) as http:
        model = arguments.model or http.get("/v1/models").json()["data"][0]["id"]
        for each in SERVERS[arguments.server]:
            if arguments.name and each.name not in arguments.name:
                continue
            bodies = [whole(body, model) for body in each.bodies]
            answers = [ask(http, body) for body in bodies]
            print(report(each, bodies, answers, arguments.version or arguments.server), flush=True)
            row = {name: getattr(each, name) for name in ("name", "request", "expected", "got")}
            rows.append({**row, "seen": each.is_seen(answers)})
    if arguments.record:
        found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
        found[arguments.server] = {"version": arguments.version, "rows": rows}
        FILE.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
