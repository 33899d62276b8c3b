"""Chat answers with tool calls and reasoning, whole and streamed, and how to get a call from a server."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context
from diptych.shared.tools.conformance.server.client import Malformed, Refused
from diptych.shared.tools.conformance.server.conversations import Talk
from diptych.shared.tools.conformance.server.semantics import CHAT, post
from diptych.shared.tools.conformance.server.streaming import chunks_of

JSON = dict[str, Any]
MODES = ("named", "required", "strict")
"""Ways to demand a call, the strictest first; strict: auto, with tools whose schema holds."""


class NoCalls(Exception):
    """The server refuses every way to demand a call."""


@dataclass(frozen=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str

    def value(self) -> Any:
        """The arguments as JSON. Raises `Malformed`."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            raise Malformed(f"arguments of {self.name} are no JSON", self.arguments) from None


@dataclass(frozen=True)
class ToolAnswer:
    """One choice. `wrong`: defects of the form of its deltas, or of the message."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: str | None
    num_prompt: int | None
    wrong: tuple[str, ...] = field(default=(), compare=False)

    def same(self) -> tuple[Any, ...]:
        """What a stream and a whole answer share: everything but ids."""
        calls = tuple((call.name, call.arguments) for call in self.calls)
        return self.content, self.reasoning, calls, self.finish_reason


def ask(context: Context, talk: Talk, stream: bool = False, **fields: Any) -> ToolAnswer:
    """Ask at temperature 0 unless `fields` say otherwise; then with a seed that follows from the request.
    Raises `Refused` and `Malformed`."""
    body: JSON = {"messages": talk.messages, "max_tokens": room(context, talk), **fields}
    if body.get("temperature") and context.offers.seed:
        body.setdefault("seed", zlib.crc32(json.dumps([talk.messages, stream]).encode()) // 2)
    if talk.tools:
        body = {"tools": talk.tools, **body}
    if not stream:
        return read_message(post(context, CHAT, **body))
    chunks, wrong = chunks_of(context, CHAT, stream_options={"include_usage": True}, **body)
    return join_deltas(chunks, wrong)


def room(context: Context, talk: Talk) -> int:
    """max_tokens of an answer: enough for a call, within the context."""
    length = context.oracle.chat.num_prompt_tokens(talk.messages, talk.tools)
    return max(1, min(200, context.oracle.context_len - length - 16))


def demand(context: Context, talk: Talk, stream: bool = False, **fields: Any) -> ToolAnswer:
    """Ask for the call of `talk` in the strictest way that the server accepts, which is found once. Raises
    `NoCalls` if it refuses all, and as `ask`."""
    assert talk.call is not None
    if context.call_mode is None:
        context.call_mode = _find_mode(context, talk)
    return ask(context, talk, stream, **demanded(talk, context.call_mode), **fields)


def demanded(talk: Talk, mode: str) -> JSON:
    """Fields that demand the call of `talk`."""
    assert talk.call is not None
    if mode == "named":
        return {"tool_choice": {"type": "function", "function": {"name": talk.call[0]}}}
    if mode == "required":
        return {"tool_choice": "required"}
    functions = [{**tool["function"], "strict": True} for tool in talk.tools]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def _find_mode(context: Context, talk: Talk) -> str:
    reasons = []
    for mode in MODES:
        try:
            if ask(context, talk, **demanded(talk, mode)).calls:
                return mode
            reasons.append(f"{mode}: an answer without a call")
        except Refused as error:
            if error.status >= 500:
                raise
            reasons.append(f"{mode}: {str(error)[:120]}")
    raise NoCalls("no call can be demanded: " + "; ".join(reasons))


def read_message(body: JSON) -> ToolAnswer:
    """The first choice of a whole answer."""
    choice = body["choices"][0]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise Malformed("a choice without a message", choice)
    calls, wrong = [], []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function") or {}
        name, arguments, call_id = function.get("name"), function.get("arguments"), entry.get("id")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise Malformed("a call without name and arguments as text", entry)
        if entry.get("type", "function") != "function":
            wrong.append(f"type of a call is {entry.get('type')!r}")
        calls.append(ToolCall(call_id if isinstance(call_id, str) else "", name, arguments))
    return ToolAnswer(
        message.get("content") or "",
        message.get("reasoning_content") or message.get("reasoning") or "",
        tuple(calls),
        choice.get("finish_reason"),
        (body.get("usage") or {}).get("prompt_tokens"),
        (*wrong, *wrong_ids(calls)),
    )


def join_deltas(chunks: Sequence[JSON], wrong: Sequence[str] = ()) -> ToolAnswer:
    """The first choice of a stream, joined as OpenAI's client does: texts of a call are added."""
    found, content, reasoning, finish, num_prompt = list(wrong), "", "", None, None
    calls: list[JSON] = []
    for chunk in chunks:
        if chunk.get("error"):
            raise Malformed("an error in the stream", chunk)
        num_prompt = (chunk.get("usage") or {}).get("prompt_tokens", num_prompt)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            finish = choice.get("finish_reason") or finish
            for piece in delta.get("tool_calls") or ():
                found += _add_piece(calls, piece)
    made = [ToolCall(call["id"], call["name"], call["arguments"]) for call in calls]
    return ToolAnswer(
        content, reasoning, tuple(made), finish, num_prompt, tuple(dict.fromkeys([*found, *wrong_ids(made)]))
    )


def _add_piece(calls: list[JSON], piece: JSON) -> list[str]:
    """Add a delta to its call. Returns its defects."""
    index, wrong = piece.get("index"), []
    if not isinstance(index, int) or not 0 <= index <= len(calls):
        return [f"a delta with index {index!r} after {len(calls)} calls"]
    function = piece.get("function") or {}
    if index == len(calls):
        calls.append({"id": "", "name": "", "arguments": ""})
        if not piece.get("id") or not function.get("name"):
            wrong.append("the first delta of a call lacks its id or name")
    else:
        if index != len(calls) - 1:
            wrong.append("a delta of a call that is not the last one")
        if piece.get("id") or function.get("name"):
            wrong.append("a later delta repeats the id or name, which OpenAI's client adds to the first")
    call = calls[index]
    call["id"] += piece.get("id") or ""
    call["name"] += function.get("name") or ""
    call["arguments"] += function.get("arguments") or ""
    return wrong


def wrong_ids(calls: Sequence[ToolCall]) -> list[str]:
    """Defects of the ids of one answer."""
    ids = [call.call_id for call in calls]
    if not all(ids):
        return ["a call without an id"]
    return ["two calls have the same id"] if len(set(ids)) < len(ids) else []
