"""Mistral's older models (Nemo, Small 3): a JSON list of calls behind `[TOOL_CALLS]`."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.dialects.parts.json_calls import dumps, json_object, read_arguments, read_json_calls
from diptych.shared.dialects.parts.tags import Format, between
from diptych.shared.interfaces.dialect import Call, NotACall, Reasoning, Steps, Stream

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LETTERS = string.ascii_letters + string.digits
ID = re.compile("[A-Za-z0-9]{9}")
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
    separator = ", "

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [
            f'{{"name": {dumps(name)}, "arguments": {dumps(arguments)}, "id": {dumps(as_id(call_id))}}}'
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
        return "".join(secrets.choice(LETTERS) for _ in range(9))

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f'{{"name": {dumps(name)}, "arguments": '
        call_id = {"type": "regex", "pattern": ', "id": "[A-Za-z0-9]{9}"'}
        content = {"type": "sequence", "elements": [json_object(schema), call_id]}
        return {"type": "tag", "begin": begin, "content": content, "end": "}"}

    def calls_format(self, tools: Mapping[str, Any], is_parallel: bool) -> Format:
        return between(f"{START}[", super().calls_format(tools, is_parallel), "]")

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for message in messages:
            if message.get("tool_calls"):
                calls = [{**call, "id": as_id(call.get("id"))} for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
            elif message.get("tool_call_id") is not None:
                message = {**message, "tool_call_id": as_id(message["tool_call_id"])}
            found.append(message)
        return found

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return START in template or (not template and has_token(START))


def as_id(call_id: Any) -> str:
    """The id, if templates take it; else one that depends on it alone."""
    text = "" if call_id is None else str(call_id)
    if ID.fullmatch(text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return "".join(LETTERS[number // 62**i % 62] for i in range(9))
