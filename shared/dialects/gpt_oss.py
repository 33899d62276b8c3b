"""GPT-OSS: harmony messages. The header of a message has a channel, and that of a call names the tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diptych.shared.dialects.parts.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    MARKERS,
    MESSAGE,
    START,
    TO,
    behind_messages,
    call_or_answer,
    read_messages,
)
from diptych.shared.dialects.parts.history import one_call_each
from diptych.shared.dialects.parts.json_calls import dumps, json_object
from diptych.shared.interfaces.dialect import Call, Dialect, Reasoning, ReasoningState, Steps, Stream


class GptOss(Dialect):
    """A template names the tool before the channel, the model behind it. A turn ends with its first call."""

    markers = MARKERS
    reasoning = Reasoning(ANALYSIS, END)
    tool_parsers = ("gpt-oss",)
    constrains_reasoning = True

    def write(self, calls: Sequence[Call]) -> str:
        bodies = [f"{TO}{c.name}{CHANNEL}commentary json{MESSAGE}{dumps(c.arguments)}" for c in calls]
        return f"{CALL}{START}assistant".join(bodies)

    def write_answer(self, reasoning: str, text: str) -> str:
        return f"{ANALYSIS}{reasoning}{END}{START}assistant{FINAL}{text}{END}{START}assistant"

    def read(self, stream: Stream, state: ReasoningState) -> Steps[None]:
        return read_messages(stream, self.reasoning is not None, state == "open")

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        begin = f"{CHANNEL}commentary{TO}{name} {CONSTRAIN}json{MESSAGE}"
        return {"type": "tag", "begin": begin, "content": json_object(schema), "end": ""}

    def calls_format(self, tools: Mapping[str, Any], is_parallel: bool) -> dict[str, Any]:
        return behind_messages(self._call_format(tools))

    def _call_format(self, tools: Mapping[str, Any]) -> dict[str, Any]:
        by_name = {name: self.tag(name, schema) for name, schema in tools.items()}
        others = [{**tag, "begin": self.write([Call(name, {})])[:-2]} for name, tag in by_name.items()]
        return {"type": "or", "elements": [*by_name.values(), *others]}

    def optional_calls_format(self, tools: Mapping[str, Any], is_parallel: bool) -> dict[str, Any]:
        return call_or_answer(self._call_format(tools))

    def text_format(self, text: dict[str, Any]) -> dict[str, Any]:
        return behind_messages({"type": "tag", "begin": FINAL, "content": text, "end": ""})

    def free_text(self, state: ReasoningState) -> tuple[str | None, str] | None:
        return None if state == "closed" else (None, FINAL)

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One call in a message; its text beside it is thinking. Templates take it under that name."""
        found = []
        for message in one_call_each(messages):
            thinking, content = message.get("reasoning_content"), message["content"]
            if thinking and content and message.get("tool_calls"):
                thinking, message = f"{thinking}\n{content}", {**message, "content": ""}
            found.append({**message, "thinking": thinking} if thinking else message)
        return found

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return CHANNEL in template or (not template and has_token(CHANNEL) and has_token(CONSTRAIN))
