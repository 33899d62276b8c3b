"""Messages in OpenAI's harmony format: `<|channel|>CHANNEL to=TOOL<|message|>BODY`, one after another.

openai-harmony reads the same, in linear time too, but from the token ids of one vocabulary, which it
downloads. This reads the text of any tokenizer, as other dialects do. A test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from diptych.shared.dialects.parts.json_calls import read_arguments
from diptych.shared.dialects.parts.tags import between
from diptych.shared.interfaces.dialect import NotACall, Steps, Stream

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
ANALYSIS, PREAMBLE, FINAL = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final"))
TO = " to=functions."

_TOOL = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def read_messages(stream: Stream, separates_reasoning: bool, is_open: bool) -> Steps[None]:
    """All messages. `final` is content, `commentary` that names no tool too, any other channel is reasoning.
    Text without a header is content, or the rest of reasoning that the prompt has opened."""
    header = ""
    for opening in (TO, CHANNEL):
        if not header and (yield from stream.accept(opening)):
            header = opening
    if not header:
        emit = stream.reasoning if is_open and separates_reasoning else stream.content
        header = yield from stream.until(*MARKERS, emit=emit)
    while header:
        header = yield from _header(stream, header)
        tool, channel = _TOOL.search(header), _CHANNEL.search(header)
        if not header:
            return
        if tool and stream.tools:
            stream.call(tool[1])
            with suppress(NotACall):
                yield from stream.space()
                yield from read_arguments(stream)
            header = yield from stream.until(*MARKERS)
            continue
        is_final = channel is not None and channel[1] in ("final", "commentary") and not tool
        emit = stream.content if is_final or not separates_reasoning else stream.reasoning
        header = yield from stream.until(*MARKERS, emit=emit)


def _header(stream: Stream, text: str) -> Steps[str]:
    """What is before a message's body. text: the beginning of the header, or a marker before it."""
    parts = [text]
    while marker := (yield from stream.until(*MARKERS, emit=parts.append)):
        if marker == MESSAGE:
            return "".join(parts)
        parts = [] if marker in (START, END, CALL, RETURN) else [*parts, marker]
    return ""


def behind_messages(form: dict[str, Any], begins: Sequence[str] = (ANALYSIS,)) -> dict[str, Any]:
    """A format that any number of messages may precede, which begin with one of `begins`."""
    any_text = {"type": "any_text", "excludes": list(MARKERS)}
    messages = [
        {"type": "tag", "begin": begin, "content": any_text, "end": f"{END}{START}assistant"}
        for begin in begins
    ]
    before = messages[0] if len(messages) == 1 else {"type": "or", "elements": messages}
    return {"type": "sequence", "elements": [{"type": "star", "content": before}, form]}


def call_or_answer(call: dict[str, Any]) -> dict[str, Any]:
    """A turn that ends with a call or with an answer of any text. Analysis and preambles may precede."""
    answer = between(FINAL, {"type": "any_text", "excludes": list(MARKERS)}, "")
    return behind_messages({"type": "or", "elements": [call, answer]}, (ANALYSIS, PREAMBLE))
