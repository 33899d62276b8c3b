"""Qwen3-Coder, Qwen3-Next-Coder, Qwen3.5: calls as tags, `<function=f>` and `<parameter=x>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps
from diptych.shared.dialects.parts.typed_values import ObjectWriter, read_value, types_of
from diptych.shared.dialects.parts.xml_arguments import Tags, xml_arguments
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

START, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

TAGS = Tags(lambda name, is_text: f"{PARAMETER}{name}>\n", f"\n{END_PARAMETER}\n", END_PARAMETER)


class Qwen3Coder(BlockDialect):
    """Strings are written raw, other values as JSON, so the tool's schema says what a text is. Models leave
    `<tool_call>` out now and then."""

    markers = (START, END, "<tool_response>", "</tool_response>", "<think>", "</think>")
    reasoning = Reasoning("<think>", "</think>")
    tool_parsers = ("qwen3_coder", "qwen3_xml")
    starts = (START, FUNCTION)
    separator = "\n"

    def write(self, calls: Sequence[Call]) -> str:
        return self.separator.join(map(_written, calls))

    def block(self, stream: Stream, start: str) -> Steps[None]:
        while start:
            if start == START:
                yield from stream.space()
            if start == START and not (yield from stream.accept(FUNCTION)):
                raise NotACall
            name = yield from stream.head(">")
            if not name or (start == FUNCTION and name not in stream.tools):
                raise NotACall
            stream.call(name)
            marker = yield from self._arguments(stream, stream.tools.get(name))
            if marker == END_FUNCTION:
                marker = yield from stream.until(END, *self.starts)
            start = marker if marker in self.starts else ""

    def _arguments(self, stream: Stream, schema: Any) -> Steps[str]:
        """The parameters of one call. Returns the marker behind them."""
        writer = ObjectWriter(stream)
        while True:
            marker = yield from stream.until(PARAMETER, END_FUNCTION, END, START)
            if marker != PARAMETER:
                if marker:
                    writer.end()
                return marker
            name = yield from stream.head(">")
            writer.key(name)
            yield from read_value(stream, types_of(schema, name), END_PARAMETER)

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin, end = f"{START}\n{FUNCTION}{name}>\n", f"{END_FUNCTION}\n{END}"
        return {"type": "tag", "begin": begin, "content": xml_arguments(schema, TAGS), "end": end}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return FUNCTION in template and PARAMETER in template


def _written(call: Call) -> str:
    values = {k: v if isinstance(v, str) else dumps(v) for k, v in call.arguments.items()}
    inside = "".join(f"{PARAMETER}{k}>\n{text}\n{END_PARAMETER}\n" for k, text in values.items())
    return f"{START}\n{FUNCTION}{call.name}>\n{inside}{END_FUNCTION}\n{END}"
