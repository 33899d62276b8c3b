"""Llama 3.1 to 3.3 with JSON calls: the answer is `{"name": "f", "parameters": {...}}`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.history import one_call_each
from diptych.shared.dialects.parts.json_calls import dumps, json_object, read_json_call
from diptych.shared.interfaces.dialect import Call, Steps, Stream

TAG = "<|python_tag|>"


class Llama3(BlockDialect):
    """An answer that begins with an object is a call if it names a tool. Several are separated by "; "."""

    markers = (TAG,)
    tool_parsers = ("llama3", "llama3_json")
    starts = (TAG,)
    bare = "{"
    separator = "; "

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [f'{{"name": {dumps(c.name)}, "parameters": {dumps(c.arguments)}}}' for c in calls]
        return self.separator.join(bodies)

    def block(self, stream: Stream, start: str) -> Steps[None]:
        while True:
            yield from read_json_call(stream, is_bare=not start)
            yield from stream.space()
            yield from stream.accept(";")
            yield from stream.space()
            if (yield from stream.peek()) != "{":
                return

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f'{{"name": {dumps(name)}, "parameters": '
        return {"type": "tag", "begin": begin, "content": json_object(schema), "end": "}"}

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Templates show one call in a message."""
        return one_call_each(messages)

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return TAG in template or "ipython" in template or (not template and has_token(TAG))
