"""Phi-4-mini: a list of JSON calls behind `functools`, or between `<|tool_call|>` and `<|/tool_call|>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps, json_object, read_json_call, read_json_calls
from diptych.shared.interfaces.dialect import Call, Steps, Stream

FUNCTOOLS, START, END = "functools[", "<|tool_call|>", "<|/tool_call|>"


class Phi4(BlockDialect):
    markers = (START, END, "<|tool_response|>", "<|tool|>", "<|/tool|>")
    tool_parsers = ("phi4_mini",)
    starts = (FUNCTOOLS, START)
    around = (FUNCTOOLS, "]")
    separator = ", "

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [f'{{"name": {dumps(call.name)}, "arguments": {dumps(call.arguments)}}}' for call in calls]
        return f"{FUNCTOOLS}{self.separator.join(bodies)}]"

    def block(self, stream: Stream, start: str) -> Steps[None]:
        if start == START:
            yield from read_json_calls(stream)
            yield from stream.until(END)
            return
        while True:
            yield from read_json_call(stream)
            yield from stream.space()
            if not (yield from stream.accept(",")):
                yield from stream.accept("]")
                return

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f'{{"name": {dumps(name)}, "arguments": '
        return {"type": "tag", "begin": begin, "content": json_object(schema), "end": "}"}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return FUNCTOOLS in template or (START in template and END in template)
