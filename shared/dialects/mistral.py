"""Mistral's older models (Nemo, Small 3): a JSON list of calls behind `[TOOL_CALLS]`.

mistral-common reads calls from the tokens of whole answers, so it does not stream. A test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps, json_object, read_arguments, read_json_calls
from diptych.shared.dialects.parts.short_ids import as_short_id, new_short_id, short_ids
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[\w.-]{1,256}")


class Mistral(BlockDialect):
    """Reads the newer form too. Ids have nine letters or digits, which templates demand."""

    markers = (
        START, CALL_ID, ARGS, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]",
        "[/THINK]",
    )  # fmt: skip
    reasoning = Reasoning("[THINK]", "[/THINK]")
    tool_parsers: tuple[str, ...] = ("mistral",)
    starts = (START,)
    around: tuple[str, str] = (f"{START}[", "]")
    separator = ", "

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [
            f'{{"name": {dumps(name)}, "arguments": {dumps(arguments)}, "id": {dumps(as_short_id(call_id))}}}'
            for name, arguments, call_id in calls
        ]
        return f"{START}[{self.separator.join(bodies)}]"

    def block(self, stream: Stream, start: str) -> Steps[None]:
        yield from stream.space()
        first = yield from stream.peek()
        if first in ("[", "{") and not (yield from stream.accept(CALL_ID)):
            yield from read_json_calls(stream)
            return
        head: list[str] = []
        marker = yield from stream.until(CALL_ID, ARGS, emit=head.append)
        name, call_id = "".join(head).strip(), ""
        if not NAME.fullmatch(name):
            raise NotACall
        if marker == CALL_ID:
            call_id = yield from stream.head(ARGS)
        stream.call(name, call_id)
        yield from stream.space()
        yield from read_arguments(stream)

    def new_id(self, name: str, index: int) -> str:
        return new_short_id()

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f'{{"name": {dumps(name)}, "arguments": '
        call_id = {"type": "regex", "pattern": ', "id": "[A-Za-z0-9]{9}"'}
        content = {"type": "sequence", "elements": [json_object(schema), call_id]}
        return {"type": "tag", "begin": begin, "content": content, "end": "}"}

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return short_ids(messages)

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return START in template or (not template and has_token(START))
