"""Calls as `invoke` elements with `parameter` elements: MiniMax M2, DeepSeek V3.2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps
from diptych.shared.dialects.parts.typed_values import ObjectWriter, read_value, types_of
from diptych.shared.dialects.parts.xml_arguments import Tags, xml_arguments
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream


class InvokeDialect(BlockDialect):
    """A block of elements between the two of `around`. Elements are named with `prefix` before the name."""

    reasoning = Reasoning("<think>", "</think>")
    separator = "\n"
    prefix: str = ""
    names_types: bool = False
    """A parameter says whether it is a text: string="true"."""

    @property
    def _tags(self) -> tuple[str, str, str, str]:
        """Begin and end of a call and of a parameter."""
        return (
            f'<{self.prefix}invoke name="', f"</{self.prefix}invoke>",
            f'<{self.prefix}parameter name="', f"</{self.prefix}parameter>",
        )  # fmt: skip

    def _begin_parameter(self, name: str, is_text: bool) -> str:
        kind = f' string="{"true" if is_text else "false"}"' if self.names_types else ""
        return f'{self._tags[2]}{name}"{kind}>'

    def write(self, calls: Sequence[Call]) -> str:
        before, behind = self.around
        invoke, end_invoke, _, end = self._tags
        bodies = []
        for name, arguments, _ in calls:
            values = {k: v if isinstance(v, str) else dumps(v) for k, v in arguments.items()}
            begins = (self._begin_parameter(k, isinstance(v, str)) for k, v in arguments.items())
            lines = [f"{begin}{text}{end}\n" for begin, text in zip(begins, values.values())]
            bodies.append(f'{invoke}{name}">\n{"".join(lines)}{end_invoke}')
        return f"{before}{self.separator.join(bodies)}{behind}"

    def block(self, stream: Stream, start: str) -> Steps[None]:
        invoke, end_invoke, parameter, end = self._tags
        finish = self.around[1].strip()
        while True:
            if (yield from stream.until(invoke, finish)) != invoke:
                if not stream.has_call:
                    raise NotACall
                return
            name = yield from stream.head('">')
            if not name:
                raise NotACall
            stream.call(name)
            writer, schema = ObjectWriter(stream), stream.tools.get(name)
            while (marker := (yield from stream.until(parameter, end_invoke, finish))) == parameter:
                key, _, kind = (yield from stream.head('">')).partition('" string="')
                writer.key(key)
                types = types_of(schema, key)
                if kind == "true":
                    types = frozenset(["string"])
                elif kind:
                    types -= {"string"}
                yield from read_value(stream, types, end)
            if marker:
                writer.end()
            if marker != end_invoke:
                return

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        invoke, end_invoke, _, end = self._tags
        content = xml_arguments(schema, Tags(self._begin_parameter, f"{end}\n", end))
        return {"type": "tag", "begin": f'{invoke}{name}">\n', "content": content, "end": end_invoke}
