"""GLM-4.5 and 4.6: a call's name, then pairs of `<arg_key>` and `<arg_value>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps
from diptych.shared.dialects.parts.typed_values import ObjectWriter, read_value, types_of
from diptych.shared.dialects.parts.xml_arguments import Tags, xml_arguments
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

START, END = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[\w.-]{1,256}")


class Glm(BlockDialect):
    """Texts are raw, the rest is JSON."""

    markers = (START, END, "<tool_response>", "</tool_response>", "<|observation|>", "<think>", "</think>")
    reasoning = Reasoning("<think>", "</think>")
    tool_parsers: tuple[str, ...] = ("glm", "glm45")
    starts = (START,)
    separator: str = "\n"
    """Also between the elements of a call."""

    def write(self, calls: Sequence[Call]) -> str:
        return self.separator.join(map(self._written, calls))

    def block(self, stream: Stream, start: str) -> Steps[None]:
        while start == START:
            head: list[str] = []
            marker = yield from stream.until(KEY, END, emit=head.append)
            name = "".join(head).strip()
            if not NAME.fullmatch(name):
                raise NotACall
            stream.call(name)
            writer = ObjectWriter(stream)
            while marker == KEY:
                key = yield from stream.head(END_KEY)
                writer.key(key)
                yield from stream.until(VALUE)
                yield from read_value(stream, types_of(stream.tools.get(name), key), END_VALUE)
                marker = yield from stream.until(KEY, END, START)
            if marker:
                writer.end()
            start = marker

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        line = self.separator
        tags = Tags(lambda key, is_text: f"{KEY}{key}{END_KEY}{line}{VALUE}", f"{END_VALUE}{line}", END_VALUE)
        content = xml_arguments(schema, tags)
        return {"type": "tag", "begin": f"{START}{name}{line}", "content": content, "end": END}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return KEY in template or (not template and has_token(KEY))

    def _written(self, call: Call) -> str:
        line = self.separator
        values = {k: v if isinstance(v, str) else dumps(v) for k, v in call.arguments.items()}
        inside = [f"{KEY}{k}{END_KEY}{line}{VALUE}{text}{END_VALUE}{line}" for k, text in values.items()]
        return f"{START}{call.name}{line}{''.join(inside)}{END}"
