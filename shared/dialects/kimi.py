"""Kimi K2: a section of calls; a call's id holds its name, `functions.f:0`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps, json_object, read_arguments
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class Kimi(BlockDialect):
    markers = (BEGIN, END, CALL, ARGUMENTS, END_CALL, "<think>", "</think>")
    reasoning = Reasoning("<think>", "</think>")
    tool_parsers = ("kimi_k2",)
    starts = (BEGIN,)
    around = (BEGIN, END)

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [
            f"{CALL}{self.new_id(call.name, i)}{ARGUMENTS}{dumps(call.arguments)}{END_CALL}"
            for i, call in enumerate(calls)
        ]
        return f"{BEGIN}{''.join(bodies)}{END}"

    def new_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def block(self, stream: Stream, start: str) -> Steps[None]:
        marker = start
        while marker in (start, END_CALL):
            marker = yield from stream.until(CALL, END)
            if marker == CALL:
                call_id = yield from stream.head(ARGUMENTS)
                name = call_id.removeprefix("functions.").partition(":")[0]
                if not name:
                    raise NotACall
                stream.call(name, call_id)
                yield from stream.space()
                yield from read_arguments(stream)
                marker = yield from stream.until(END_CALL, END)
            elif not stream.has_call:
                raise NotACall

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        parts = [
            {"type": "regex", "pattern": "[0-9]{1,4}"},
            {"type": "const_string", "value": ARGUMENTS},
            json_object(schema),
        ]
        content = {"type": "sequence", "elements": parts}
        return {"type": "tag", "begin": f"{CALL}functions.{name}:", "content": content, "end": END_CALL}

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Ids are numbered through the whole conversation."""
        renamed: dict[Any, str] = {}
        found = []
        for message in messages:
            if message.get("tool_calls"):
                calls = []
                for call in message["tool_calls"]:
                    new = self.new_id(call["function"]["name"], len(renamed))
                    renamed[call.get("id", new)] = new
                    calls.append({**call, "id": new})
                message = {**message, "tool_calls": calls}
            elif message.get("tool_call_id") in renamed:
                message = {**message, "tool_call_id": renamed[message["tool_call_id"]]}
            found.append(message)
        return found

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return BEGIN in template or (not template and has_token(BEGIN))
