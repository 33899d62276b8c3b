"""DeepSeek V3 and R1: calls between markers, their arguments in a fence of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps, json_object, read_arguments
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUTPUTS = tuple(f"<｜tool▁{name}｜>" for name in (
    "outputs▁begin", "output▁begin", "output▁end", "outputs▁end",
))  # fmt: skip


class DeepSeekV3(BlockDialect):
    markers = (BEGIN, END, CALL, SEPARATOR, END_CALL, *OUTPUTS, "<think>", "</think>")
    reasoning = Reasoning("<think>", "</think>")
    tool_parsers = ("deepseekv3",)
    starts = (BEGIN,)
    around = (BEGIN, END)
    separator = "\n"
    before, opening, closing = f"function{SEPARATOR}", "\n```json\n", "\n```"
    """Before a call's name, between it and the arguments, and behind them."""

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [
            f"{CALL}{self.before}{call.name}{self.opening}{dumps(call.arguments)}{self.closing}{END_CALL}"
            for call in calls
        ]
        return f"{BEGIN}{self.separator.join(bodies)}{END}"

    def block(self, stream: Stream, start: str) -> Steps[None]:
        marker = start
        while marker in (start, END_CALL):
            marker = yield from stream.until(CALL, END)
            if marker == CALL:
                stream.call((yield from self._name(stream)))
                yield from stream.space()
                yield from read_arguments(stream)
                marker = yield from stream.until(END_CALL, END)
            elif not stream.has_call:
                raise NotACall

    def _name(self, stream: Stream) -> Steps[str]:
        yield from stream.head(SEPARATOR)
        name = yield from stream.head("\n")
        yield from stream.accept("```json")
        if not name:
            raise NotACall
        return name

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin, end = f"{CALL}{self.before}{name}{self.opening}", f"{self.closing}{END_CALL}"
        return {"type": "tag", "begin": begin, "content": json_object(schema), "end": end}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return BEGIN in template and "```json" in template
