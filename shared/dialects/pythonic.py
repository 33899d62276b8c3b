"""Llama 3.2 and 4 with calls in Python: `[f(x=1), g(s='a')]`, in Llama 4 maybe between markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps
from diptych.shared.dialects.parts.python_calls import keywords_format, read_python_call
from diptych.shared.interfaces.dialect import Call, NotACall, Steps, Stream

START, END = "<|python_start|>", "<|python_end|>"


class Pythonic(BlockDialect):
    """An answer that begins with `[` is a list of calls if the first one names a tool."""

    markers = (START, END)
    tool_parsers = ("pythonic", "llama4", "llama4_pythonic")
    starts, end = (START,), END
    bare = "["
    around = ("[", "]")
    separator = ", "

    def write(self, calls: Sequence[Call]) -> str:
        texts = (
            ", ".join(f"{key}={dumps(value)}" for key, value in call.arguments.items()) for call in calls
        )
        return f"[{', '.join(f'{call.name}({text})' for call, text in zip(calls, texts))}]"

    def block(self, stream: Stream, start: str) -> Steps[None]:
        yield from stream.space()
        if not (yield from stream.accept("[")):
            raise NotACall
        while True:
            yield from read_python_call(stream, is_bare=not start)
            yield from stream.space()
            if not (yield from stream.accept(",")):
                break
        yield from stream.accept("]")

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        return {"type": "tag", "begin": f"{name}(", "content": keywords_format(schema), "end": ")"}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return (
            START in template or "[func_name1(params_name1" in template or (not template and has_token(START))
        )
