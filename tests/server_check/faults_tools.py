"""Faults of tool calls: of the request for one, and of what becomes of it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

from tests.server_check.faults import changes_reply, changes_request, fault
from tests.server_check.faults_chat import without
from tests.server_check.faulty_proxy import Ask, Body, FaultyProxy, Reply


def calls_of(reply: Reply) -> list[Body]:
    """The functions of the calls of a whole answer."""
    messages = [choice.get("message") or {} for choice in reply.choices]
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]


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


# ---- long calls ----


@fault("arguments read again", "Each token of streamed arguments reads all before it.", "tools.long")
async def read_again(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    reply = await ask(body)
    if reply.is_stream and body.get("tools"):
        reply.pause = lambda i: 2.5e-4 * i
    return reply


@fault(
    "others wait for a stream", "No other request is answered before a stream of a call ends.", "tools.long"
)
async def others_wait(body: Body, ask: Ask, proxy: FaultyProxy) -> Reply:
    is_long = bool(body.get("stream") and body.get("tools"))
    while not is_long and proxy.num_in_flight > 1:
        await asyncio.sleep(0.01)
    reply = await ask(body)
    if is_long:
        reply.pause = lambda i: 0.02
    return reply


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
    "pattern of a streamed tool ignored", "Streamed calls act as without pattern.", "pattern", True
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
