"""Faults of chat: prompts, reasoning, JSON Schema, parameters, single tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.server_check.faults import changes_reply, changes_request, fault
from tests.server_check.faulty_proxy import Ask, Body, FaultyProxy, Reply


def messages_of(body: Body, change: Callable[[Body], Body | None]) -> Body | None:
    """The request with other messages; None from `change`: the message is left out."""
    if "messages" not in body:
        return None
    found = [change(dict(message)) for message in body["messages"]]
    return {"messages": [message for message in found if message is not None]}


def without(schema: Any, *keywords: str) -> Any:
    """The schema without keywords, at any depth."""
    if isinstance(schema, list):
        return [without(each, *keywords) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: without(value, *keywords) for name, value in schema.items() if name not in keywords}


# ---- prompts ----


@changes_request("system message dropped", "The template's prompt lacks the system message.", "prompt.chat")
def system_dropped(body: Body) -> Body | None:
    if len(body.get("messages", ())) < 2:
        return None
    return messages_of(body, lambda message: None if message["role"] == "system" else message)


@changes_reply("one prompt token too many", "A second begin-of-sequence token.", "prompt.chat")
def one_token_more(body: Body, reply: Reply) -> None:
    for usage in (chunk["usage"] for chunk in reply.chunks if chunk.get("usage")):
        usage["prompt_tokens"] += "messages" in body


@changes_request("text stripped", "White space around a message is removed.", "prompt.chat")
def text_stripped(body: Body) -> Body | None:
    def strip(message: Body) -> Body:
        content = message.get("content")
        return {**message, "content": content.strip() if isinstance(content, str) else content}

    return messages_of(body, strip)


@changes_request("null content printed", "Null content of a call is the text None.", "prompt.history")
def null_printed(body: Body) -> Body | None:
    return messages_of(body, lambda m: {**m, "content": "None" if m.get("content") is None else m["content"]})


@changes_request("parts on lines", "Parts of a content are joined by a newline.", "prompt.history")
def parts_on_lines(body: Body) -> Body | None:
    def join(message: Body) -> Body:
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = "\n".join(part["text"] for part in content)
        return message

    return messages_of(body, join)


@changes_request("calls vanish", "Calls of the history are not in the prompt.", "prompt.history")
def calls_vanish(body: Body) -> Body | None:
    def plain(message: Body) -> Body:
        message.pop("tool_calls", None)
        role = "user" if message["role"] == "tool" else message["role"]
        return {"role": role, "content": message.get("content") or ""}

    return messages_of(body, plain)


@changes_request("one call of each message", "The second call of a message is lost.", "prompt.history")
def first_call_only(body: Body) -> Body | None:
    lost = {each["id"] for m in body.get("messages", ()) for each in (m.get("tool_calls") or ())[1:]}

    def first(message: Body) -> Body | None:
        if message.get("tool_calls"):
            message["tool_calls"] = message["tool_calls"][:1]
        return None if message.get("tool_call_id") in lost else message

    return messages_of(body, first)


@changes_request("results in quotes", "Parts of a result come as their JSON.", "prompt.history")
def results_in_quotes(body: Body) -> Body | None:
    def quote(message: Body) -> Body:
        is_list = message["role"] == "tool" and isinstance(message["content"], list)
        return {**message, "content": json.dumps(message["content"])} if is_list else message

    return messages_of(body, quote)


@fault("live markers", "Markers in messages become control tokens.", "prompt.markers")
async def live_markers(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    reply = await ask(body)
    if reply.status == 200 and "messages" in body and not any("tool_calls" in m for m in body["messages"]):
        text = proxy.tokenizer.render(body["messages"], tools=body.get("tools"))
        for usage in (chunk["usage"] for chunk in reply.chunks if chunk.get("usage")):
            usage["prompt_tokens"] = len(proxy.tokenizer.encode(text, False))
    return reply


# ---- reasoning ----


@changes_reply("reasoning in the text", "Reasoning is part of the text.", "reasoning.apart")
def reasoning_in_text(body: Body, reply: Reply) -> None:
    for choice in reply.choices:
        message = choice.get("message") or choice.get("delta") or {}
        thought = message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        if thought:
            message["content"] = thought + (message.get("content") or "")


@changes_request("always thinking", "The switch for thinking has no effect.", "reasoning.off")
def always_thinking(body: Body) -> Body | None:
    return {"chat_template_kwargs": None}


@changes_request("old thoughts kept", "Earlier reasoning stays in the prompt.", "reasoning.history")
def thoughts_kept(body: Body) -> Body | None:
    def keep(message: Body) -> Body:
        thought = message.pop("reasoning_content", None)
        return {**message, "content": f"{thought}\n{message['content']}"} if thought else message

    return messages_of(body, keep)


@changes_request("thoughts beside calls kept", "Reasoning beside a call is text.", "reasoning.history")
def thoughts_of_calls_kept(body: Body) -> Body | None:
    def keep(message: Body) -> Body:
        thought = message.get("reasoning_content") if message.get("tool_calls") else None
        return {**message, "content": thought} if thought else message

    return messages_of(body, keep)


@changes_request(
    "thinking in long talks", "The switch for thinking acts in the first turn only.", "reasoning.history"
)
def thinking_in_long_talks(body: Body) -> Body | None:
    return {"chat_template_kwargs": None} if len(body.get("messages", ())) > 2 else None


# ---- JSON Schema ----


def ignores(*keywords: str, check: str = "schema.keywords") -> None:
    """A fault: keywords of a schema have no effect."""

    name = " and ".join(keywords)

    @changes_request(f"{name} ignored", f"Schemas act as if they had no {name}.", check)
    def play(body: Body) -> Body | None:
        shape = body.get("response_format") or {}
        if shape.get("type") != "json_schema":
            return None
        return {"response_format": {**shape, "json_schema": without(shape["json_schema"], *keywords)}}


ignores("multipleOf")
ignores("uniqueItems")
ignores("pattern")
ignores("not")
ignores("dependentRequired")
ignores(
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", check="schema.random"
)


# ---- parameters ----


@changes_request("presence penalty ignored in chat", "Chat drops presence_penalty.", "sampling.chat")
def chat_presence_ignored(body: Body) -> Body | None:
    return {"presence_penalty": None} if "messages" in body else None


@changes_request("frequency penalty ignored in chat", "Chat drops frequency_penalty.", "sampling.chat")
def chat_frequency_ignored(body: Body) -> Body | None:
    return {"frequency_penalty": None} if "messages" in body else None


@changes_request("logit_bias ignored in chat", "Chat drops logit_bias.", "sampling.chat")
def chat_bias_ignored(body: Body) -> Body | None:
    return {"logit_bias": None} if "messages" in body else None


@changes_request("top_k ignored in chat", "Chat drops top_k.", "sampling.chat")
def chat_top_k_ignored(body: Body) -> Body | None:
    return {"top_k": None} if "messages" in body else None


@changes_request("unknown fields ignored", "Fields that are not known are dropped.", "semantics.unsupported")
def unknown_ignored(body: Body) -> Body | None:
    return {"presence_penalti": None, "no_such_field": None}


# ---- single tokens ----


@changes_request("another seed", "The seed is one higher.", "seeded.sampled")
def another_seed(body: Body) -> Body | None:
    return {"seed": body["seed"] + 1} if body.get("seed") is not None else None


@fault("some other seeds", "One token of 4 is drawn with another seed.", "seeded.sampled")
async def some_other_seeds(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    if body.get("seed") is not None and body["seed"] % 4 == 0:
        body = {**body, "seed": body["seed"] + 1}
    return await ask(body)


@changes_request("warmer", "The temperature is 15 % higher.", "seeded.sampled")
def warmer(body: Body) -> Body | None:
    return {"temperature": body["temperature"] * 1.15} if body.get("temperature") else None


@fault("some greedy tokens drawn", "One greedy token of 6 is drawn at temperature 2.", "seeded.greedy")
async def some_drawn(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    length = len(proxy.prompts(body)[0]) if body.get("prompt") else 1
    hot = {"temperature": 2.0} if body.get("temperature") == 0 and length % 6 == 0 else {}
    return await ask({**body, **hot})
