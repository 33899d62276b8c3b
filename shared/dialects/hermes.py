"""Hermes 2 and 3, Qwen 2.5, Qwen 3, QwQ, SmolLM3: JSON calls between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps, json_object, read_json_calls
from diptych.shared.interfaces.dialect import Call, Reasoning, Steps, Stream

START, END = "<tool_call>", "</tool_call>"
XML_TOOLS = "xml_tools"
"""What SmolLM3's template calls the tools of such calls."""


class Hermes(BlockDialect):
    """Several calls are several blocks, with a newline between them."""

    markers = (START, END, "<tool_response>", "</tool_response>", "<think>", "</think>")
    reasoning = Reasoning("<think>", "</think>")
    tool_parsers = ("hermes", "qwen", "qwen25")
    starts, end = (START,), END
    separator = "\n"

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [f'{{"name": {dumps(call.name)}, "arguments": {dumps(call.arguments)}}}' for call in calls]
        return self.separator.join(f"{START}\n{body}\n{END}" for body in bodies)

    def block(self, stream: Stream, start: str) -> Steps[None]:
        return read_json_calls(stream)

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f'{START}\n{{"name": {dumps(name)}, "arguments": '
        return {"type": "tag", "begin": begin, "content": json_object(schema), "end": f"}}\n{END}"}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return START in template or XML_TOOLS in template or (not template and has_token(START))
