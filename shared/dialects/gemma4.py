"""Gemma 4: `call:name{...}` with bare keys, and texts between `<|"|>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.gemma_arguments import QUOTE, gemma_object
from diptych.shared.dialects.parts.json_calls import dumps
from diptych.shared.dialects.parts.typed_values import as_json, read_text
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

START, END = "<|tool_call>", "<tool_call|>"
MAX_DEPTH = 64


class Gemma4(BlockDialect):
    markers = (
        START, END, QUOTE, "<|tool_response>", "<tool_response|>", "<|tool>", "<tool|>", "<|channel>",
        "<channel|>", "<|think|>",
    )  # fmt: skip
    reasoning = Reasoning("<|channel>thought\n", "<channel|>")
    tool_parsers = ("gemma4",)
    starts, end = (START,), END

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(f"{START}call:{call.name}{_written(call.arguments)}{END}" for call in calls)

    def block(self, stream: Stream, start: str) -> Steps[None]:
        yield from stream.space()
        if not (yield from stream.accept("call:")):
            raise NotACall
        name = yield from stream.head("{")
        if not name:
            raise NotACall
        stream.call(name)
        yield from _object(stream, 0)

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f"{START}call:{name}"
        return {"type": "tag", "begin": begin, "content": gemma_object(schema), "end": END}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return START in template or (not template and has_token(START))


def _value(stream: Stream, depth: int) -> Steps[str]:
    """A value, given out as JSON. Returns the character behind it that it took, or ""."""
    yield from stream.space()
    if depth > MAX_DEPTH:
        raise NotACall
    if (yield from stream.accept(QUOTE)):
        yield from read_text(stream, QUOTE)
    elif (yield from stream.peek()) == '"':  # JSON
        yield from stream.json(stream.arguments)
    elif (yield from stream.accept("{")):
        yield from _object(stream, depth + 1)
    elif (yield from stream.accept("[")):
        yield from _list(stream, depth + 1)
    else:
        parts: list[str] = []
        found = yield from stream.until(",", "}", "]", END, emit=parts.append)
        if found:
            stream.arguments(as_json("".join(parts).strip(), frozenset()))
        return found or END
    return ""


def _object(stream: Stream, depth: int) -> Steps[None]:
    """Behind its brace."""
    before, found = "{", ""
    while found not in ("}", END):
        yield from stream.space()
        if (yield from stream.accept("}")):
            break
        if (yield from stream.accept(QUOTE)):
            key = yield from stream.head(QUOTE)
            yield from stream.until(":")
        else:
            key = (yield from stream.head(":")).strip('"')
        stream.arguments(f"{before}{dumps(key)}: ")
        before = ", "
        found = (yield from _value(stream, depth)) or (yield from stream.until(",", "}", END)) or END
    if found != END:
        stream.arguments("}" if before == ", " else "{}")


def _list(stream: Stream, depth: int) -> Steps[None]:
    """Behind its bracket."""
    before, found = "[", ""
    while found not in ("]", END):
        yield from stream.space()
        if (yield from stream.accept("]")):
            break
        stream.arguments(before)
        before = ", "
        found = (yield from _value(stream, depth)) or (yield from stream.until(",", "]", END)) or END
    if found != END:
        stream.arguments("]" if before == ", " else "[]")


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(value[key])}' for key in sorted(value, key=str.lower))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return dumps(value)
