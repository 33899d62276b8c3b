"""Messages of a conversation, checked and brought into the form that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.shared.dialects.parts.json_calls import loads
from diptych.shared.interfaces.dialect import Dialect


def as_history(dialect: Dialect, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a chat template: content is never None, arguments of calls are objects, reasoning that
    stands in the content has a field of its own, and what the dialect changes. Raises `ValueError` for a
    result without its call, and for arguments that are no JSON object."""
    found, known = [], set[str]()
    for i, message in enumerate(messages):
        message = dict(message)
        if message.get("content") is None:
            message["content"] = ""
        if message["role"] == "assistant":
            _split_reasoning(dialect, message)
        if message.get("tool_calls"):
            message["tool_calls"] = [_as_object(call, i) for call in message["tool_calls"]]
            known |= {call["id"] for call in message["tool_calls"] if call.get("id") is not None}
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and call_id is not None and call_id not in known:
            raise ValueError(
                f"message {i} is the result of call {call_id!r}, which no message before it makes"
            )
        found.append(message)
    return dialect.history(found)


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with several calls as one message for each call, with its result behind it: for templates that
    show only the first."""
    found: list[dict[str, Any]] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        num_results = next((i for i, m in enumerate(rest) if m["role"] != "tool"), len(rest))
        results, rest = rest[:num_results], rest[num_results:]
        for i, call in enumerate(calls):
            head = message if i == 0 else {"role": "assistant", "content": ""}
            its = [m for m in results if m.get("tool_call_id") == call.get("id")] or results[:1]
            found += [{**head, "tool_calls": [call]}, *its]
            results = [m for m in results if m not in its]
        found += results
    return found


def _split_reasoning(dialect: Dialect, message: dict[str, Any]) -> None:
    """Content that begins with a whole block of reasoning, as a model wrote it."""
    content = message["content"]
    if dialect.reasoning is None or not isinstance(content, str) or message.get("reasoning_content"):
        return
    start, end, _ = dialect.reasoning
    if content.lstrip().startswith(start) and end in content:
        reasoning, _, rest = content.lstrip().removeprefix(start).partition(end)
        message |= {"content": rest.lstrip("\n"), "reasoning_content": reasoning.strip("\n")}


def _as_object(call: dict[str, Any], index: int) -> dict[str, Any]:
    """Templates write arguments as JSON themselves: a text would be encoded twice, vanish or fail."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"message {index}: the arguments of the call of {function.get('name')!r} are no JSON object"
        )
    return {**call, "function": {**function, "arguments": arguments}}
