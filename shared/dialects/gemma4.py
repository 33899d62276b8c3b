"""Gemma 4: `call:name{...}` with bare keys, and texts between `<|"|>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.gemma_arguments import END, QUOTE, gemma_object, read_container, written
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

START = "<|tool_call>"


class Gemma4(BlockDialect):
    markers = (
        START, END, QUOTE, "<|tool_response>", "<tool_response|>", "<|tool>", "<tool|>", "<|channel>",
        "<channel|>", "<|think|>",
    )  # fmt: skip
    reasoning = Reasoning("<|channel>thought\n", "<channel|>")
    tool_parsers = ("gemma4",)
    starts, end = (START,), END

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(f"{START}call:{call.name}{written(call.arguments)}{END}" for call in calls)

    def block(self, stream: Stream, start: str) -> Steps[None]:
        yield from stream.space()
        if not (yield from stream.accept("call:")):
            raise NotACall
        name = yield from stream.head("{")
        if not name:
            raise NotACall
        stream.call(name)
        yield from read_container(stream, "{")

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f"{START}call:{name}"
        return {"type": "tag", "begin": begin, "content": gemma_object(schema), "end": END}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return START in template or (not template and has_token(START))
