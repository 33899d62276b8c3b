"""Faults of chat: prompts, tool calls, reasoning, JSON Schema, single tokens."""

from __future__ import annotations

import copy
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


def calls_of(reply: Reply) -> list[Body]:
    """The functions of the calls of a whole answer."""
    messages = [choice.get("message") or {} for choice in reply.choices]
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]


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
    def first(message: Body) -> Body:
        return {**message, "tool_calls": message["tool_calls"][:1]} if message.get("tool_calls") else message

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


# ---- tool_choice ----


@changes_request("required ignored", "tool_choice required acts as auto.", "tools.required")
def required_ignored(body: Body) -> Body | None:
    return {"tool_choice": "auto"} if body.get("tool_choice") == "required" and body.get("tools") else None


@changes_request("named as first", "A named tool gives a call of the first tool.", "tools.named")
def named_as_first(body: Body) -> Body | None:
    if not isinstance(body.get("tool_choice"), dict):
        return None
    first = body["tools"][0]["function"]["name"]
    return {"tool_choice": {"type": "function", "function": {"name": first}}}


@changes_request("none ignored", "tool_choice none acts as auto.", "tools.none")
def none_ignored(body: Body) -> Body | None:
    return {"tool_choice": "auto"} if body.get("tool_choice") == "none" else None


@changes_reply("parallel calls", "parallel_tool_calls false has no effect.", "tools.parallel")
def parallel_calls(body: Body, reply: Reply) -> None:
    for choice in reply.choices if body.get("parallel_tool_calls") is False else ():
        calls = (choice.get("message") or {}).get("tool_calls")
        if calls:
            calls.append({**copy.deepcopy(calls[0]), "id": "call_another"})


@changes_request("no tools needed", "tool_choice required without tools is text.", "tools.without_tools")
def no_tools_needed(body: Body) -> Body | None:
    return None if body.get("tools") else {"tool_choice": None}


def changes_deltas(name: str, sentence: str, change: Callable[[Body, int], None]) -> None:
    """A fault of streams: `change` gets each delta of a call, with the number of those before it."""

    @changes_reply(name, sentence, "tools.stream")
    def play(body: Body, reply: Reply) -> None:
        num = 0
        for choice in reply.choices if reply.is_stream else ():
            for piece in (choice.get("delta") or {}).get("tool_calls") or ():
                change(piece, num)
                num += 1


def repeat_name(piece: Body, num: int) -> None:
    piece["function"]["name"] = "get"


def repeat_id(piece: Body, num: int) -> None:
    piece["id"] = "c1"


def index_from_one(piece: Body, num: int) -> None:
    piece["index"] += 1


def lose_arguments(piece: Body, num: int) -> None:
    if num == 2:
        piece["function"]["arguments"] = ""


changes_deltas("repeated name", "Every delta of a call has its name.", repeat_name)
changes_deltas("repeated id", "Every delta of a call has its id, the same in each answer.", repeat_id)
changes_deltas("index from 1", "The calls of a stream are counted from 1.", index_from_one)
changes_deltas("lost arguments", "A stream lacks a piece of the arguments.", lose_arguments)


@changes_reply("cut call complete", "A call that max_tokens cuts ends with tool_calls.", "tools.cut")
def cut_complete(body: Body, reply: Reply) -> None:
    for choice in reply.choices if body.get("tools") else ():
        if choice.get("finish_reason") == "length":
            choice["finish_reason"] = "tool_calls"


@changes_request("a format without tools", "A response_format switches tools off.", "tools.format")
def format_without_tools(body: Body) -> Body | None:
    return {"tools": None, "tool_choice": None} if body.get("response_format") else None


@changes_request("no format beside tools", "Tools switch a response_format off.", "tools.format")
def no_format(body: Body) -> Body | None:
    return {"response_format": None} if body.get("tools") else None


# ---- what becomes of a call ----


def changes_arguments(name: str, sentence: str, check: str, change: Callable[[Any], Any]) -> None:
    """A fault of whole answers: the arguments become others."""

    @changes_reply(name, sentence, check)
    def play(body: Body, reply: Reply) -> None:
        for function in calls_of(reply):
            try:
                value = json.loads(function["arguments"])
            except ValueError:
                continue
            function["arguments"] = json.dumps(change(value), ensure_ascii=False)


def without_last(value: Any) -> Any:
    return {name: value[name] for name in list(value)[:-1]} if isinstance(value, dict) else value


def typed(value: Any) -> Any:
    def guess(each: Any) -> Any:
        try:
            return json.loads(each) if isinstance(each, str) else each
        except ValueError:
            return each

    return {name: guess(each) for name, each in value.items()} if isinstance(value, dict) else value


def without_capitals(value: Any) -> Any:
    return json.loads(json.dumps(value).lower())


changes_arguments("lost argument", "The last argument is lost.", "tools.arguments", without_last)
changes_arguments("guessed types", 'The text "123" becomes a number.', "tools.types", typed)
changes_arguments("small letters", "Arguments lose their capital letters.", "tools.parsed", without_capitals)


@changes_reply("guessed types in streams", "Streamed arguments lose their quotes.", "tools.types")
def typed_stream(body: Body, reply: Reply) -> None:
    deltas = [choice.get("delta") or {} for choice in reply.choices if reply.is_stream]
    functions = [piece["function"] for delta in deltas for piece in delta.get("tool_calls") or ()]
    text = "".join(function.get("arguments") or "" for function in functions)
    for function in functions:
        function["arguments"] = ""
    if functions:
        functions[-1]["arguments"] = text.replace('"123"', "123")


def ignores_in_tools(name: str, sentence: str, keyword: str, in_streams: bool) -> None:
    @changes_request(name, sentence, "tools.schemas")
    def play(body: Body) -> Body | None:
        if in_streams and not body.get("stream"):
            return None
        return {"tools": without(body["tools"], keyword)} if body.get("tools") else None


ignores_in_tools("uniqueItems of a tool ignored", "Tools act as without uniqueItems.", "uniqueItems", False)
ignores_in_tools(
    "multipleOf of a streamed tool ignored", "Streamed calls act as without multipleOf.", "multipleOf", True
)


@changes_reply("calls as text", "A call comes as text.", "tools.trigger")
def calls_as_text(body: Body, reply: Reply) -> None:
    for choice in reply.choices:
        message = choice.get("message") or {}
        if message.get("tool_calls"):
            call = message.pop("tool_calls")[0]["function"]
            message["content"], choice["finish_reason"] = json.dumps(call), "stop"


@changes_request("a call to every request", "auto acts as required.", "tools.trigger")
def always_calls(body: Body) -> Body | None:
    return {"tool_choice": "required"} if body.get("tool_choice") == "auto" else None


@changes_reply("leaked marker", "The end marker of a call stays in the text.", "tools.leak")
def leaked_marker(body: Body, reply: Reply) -> None:
    for choice in reply.choices:
        message = choice.get("message") or {}
        if message.get("tool_calls"):
            message["content"] = "</tool_call>"


@changes_reply("leaked marker in streams", "A stream begins with the marker of a call.", "tools.leak")
def leaked_marker_in_streams(body: Body, reply: Reply) -> None:
    for choice in reply.choices if reply.is_stream else ():
        delta = choice.get("delta") or {}
        for piece in delta.get("tool_calls") or ():
            if piece["function"].get("name"):
                delta["content"] = "<tool_call>"


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
        return {
            "response_format": {**shape, "json_schema": without(shape["json_schema"], *keywords)},
        }


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
