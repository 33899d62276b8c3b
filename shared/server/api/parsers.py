"""Splitting a model's text while it streams: reasoning from content, tool calls from prose.

A parser takes text piece by piece and gives events; text that may be the beginning of a marker is held back
until it is clear. `finish` gives the rest.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

THINK_START, THINK_END = "<think>", "</think>"


class Piece(NamedTuple):
    """Text of one kind."""

    kind: Literal["content", "reasoning"]
    text: str


class ToolDelta(NamedTuple):
    """A piece of a tool call. `name` and `call_id` are set in its first piece only."""

    index: int  # type: ignore[assignment]  # in place of tuple.index
    arguments: str
    name: str | None = None
    call_id: str | None = None


def held_length(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` may begin."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class ReasoningParser:
    """Text up to THINK_END is reasoning. `starts_inside`: the chat template has written THINK_START already;
    else the text is content unless it begins with THINK_START. Newlines next to the markers are dropped, the
    same ones however the text is cut into pieces."""

    def __init__(self, starts_inside: bool) -> None:
        self._held = ""
        self._state: Literal["before", "inside", "after"] = "inside" if starts_inside else "before"
        self._drops_newlines = False

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._state == "before":
            stripped = self._held.lstrip()
            if stripped.startswith(THINK_START):
                self._held, self._state = stripped[len(THINK_START) :], "inside"
                self._drops_newlines = True
            elif THINK_START.startswith(stripped):
                return []
            else:
                self._state = "after"
        if self._state == "inside":
            before, marker, after = self._held.partition(THINK_END)
            keep = 0 if marker else held_length(before, THINK_END)
            pieces += self._piece("reasoning", before[: len(before) - keep])
            if not marker:
                self._held = before[len(before) - keep :]
                return pieces
            self._held, self._state, self._drops_newlines = after, "after", True
        held, self._held = self._held, ""
        return pieces + self._piece("content", held)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        return self._piece("reasoning" if self._state == "inside" else "content", held)

    def _piece(self, kind: Literal["content", "reasoning"], text: str) -> list[Piece]:
        if self._drops_newlines:
            text = text.lstrip("\n")
            self._drops_newlines = not text
        return [Piece(kind, text)] if text else []


@dataclass
class ToolParser:
    """Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen). The arguments are
    streamed as they are written; a call that never becomes valid stays what it is: content. Calls beyond
    `max_calls` are dropped."""

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    max_calls: int | None = None  # None: any number
    num_calls: int = 0
    _held: str = ""
    _inside: bool = False
    _drops_newlines: bool = False  # behind a call
    _num_sent: int = 0  # characters of the arguments of the open call
    _is_named: bool = False

    def feed(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Content outside of calls, and pieces of calls."""
        self._held += text
        content, deltas = "", list[ToolDelta]()
        while True:
            if not self._inside:
                before, marker, after = self._held.partition(self.start)
                keep = 0 if marker else held_length(before, self.start)
                content += self._content(before[: len(before) - keep])
                self._held = before[len(before) - keep :]
                if not marker:
                    return content, deltas
                self._held, self._inside, self._num_sent, self._is_named = after, True, 0, False
            body, marker, after = _partition_call(self._held, self.end)
            if not marker:
                body = body[: len(body) - held_length(body, self.end)]
            deltas += self._allowed(self._open_call(body, is_complete=bool(marker)))
            if not marker:
                return content, deltas
            if self._is_named:
                self.num_calls += 1
            else:
                content += self.start + body + self.end
            self._held, self._inside, self._drops_newlines = after, False, self._is_named

    def _content(self, text: str) -> str:
        if self._drops_newlines:
            text = text.lstrip("\n")
            self._drops_newlines = not text
        return text

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """What is left is content, unless it belongs to a call whose name was sent."""
        held, self._held = self._held, ""
        if not self._inside:
            return self._content(held), []
        self._inside = False
        if self._is_named:
            arguments = _arguments_text(held)
            rest = (arguments or "")[self._num_sent :]
            return "", self._allowed([ToolDelta(self.num_calls, rest)] if rest else [])
        return self.start + held, []

    def _allowed(self, deltas: list[ToolDelta]) -> list[ToolDelta]:
        return [delta for delta in deltas if self.max_calls is None or delta.index < self.max_calls]

    def _open_call(self, body: str, is_complete: bool) -> list[ToolDelta]:
        deltas = []
        if not self._is_named:
            name = _name(body)
            if name is None or _arguments_text(body) is None:
                if not is_complete:
                    return []
                try:
                    call = json.loads(body)
                except ValueError:
                    return []
                if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                    return []
                name = call["name"]
            self._is_named = True
            deltas.append(ToolDelta(self.num_calls, "", name, f"call_{uuid.uuid4().hex[:24]}"))
        arguments = _arguments_text(body)
        if is_complete:
            arguments = _complete_arguments(body, arguments)
        if arguments is not None and len(arguments) > self._num_sent:
            deltas.append(ToolDelta(self.num_calls, arguments[self._num_sent :]))
            self._num_sent = len(arguments)
        return deltas


def _name(body: str) -> str | None:
    """The call's name, once it is written whole, if it comes first."""
    text = body.lstrip()
    if not text.startswith("{"):
        return None
    decoder = json.JSONDecoder()
    try:
        key, end = decoder.raw_decode(text, text.index('"'))
        if key != "name":
            return None
        start = text.index('"', text.index(":", end))
        name, _ = decoder.raw_decode(text, start)
    except ValueError:
        return None
    return name if isinstance(name, str) else None


def _arguments_text(body: str) -> str | None:
    """The text of the arguments as far as it is written: a balanced JSON value, or a beginning of one."""
    decoder = json.JSONDecoder()
    text = body
    try:
        _, end = decoder.raw_decode(text, text.index('"'))  # "name"
        start = text.index('"', text.index(":", end))
        _, end = decoder.raw_decode(text, start)
        key, end = decoder.raw_decode(text, text.index('"', text.index(",", end)))
        if key not in ("arguments", "parameters"):
            return None
        start = text.index(":", end) + 1
    except ValueError:
        return None
    while start < len(text) and text[start] in " \n\t\r":
        start += 1
    return text[start : _value_end(text, start)]


def _value_end(text: str, start: int) -> int:
    """Behind the JSON object or array that begins at `start`; the text's end while it is open."""
    depth = 0
    for i in _outside_strings(text, start):
        if text[i] in "{[":
            depth += 1
        elif text[i] in "}]":
            depth -= 1
            if depth == 0:
                return i + 1
            if depth < 0:
                return i
    return len(text)


def _partition_call(text: str, end: str) -> tuple[str, str, str]:
    """`text.partition(end)`, at the first place outside of JSON strings: arguments may contain the marker."""
    for i in _outside_strings(text, 0):
        if text.startswith(end, i):
            return text[:i], end, text[i + len(end) :]
    return text, "", ""


def _outside_strings(text: str, start: int) -> Iterator[int]:
    """The places from `start` on that are not in a JSON string."""
    is_string, is_escaped = False, False
    for i in range(start, len(text)):
        character = text[i]
        if not is_string:
            is_string = character == '"'
            if not is_string:
                yield i
        elif is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == '"':
            is_string = False


def _complete_arguments(body: str, streamed: str | None) -> str | None:
    """The arguments of a call that is complete: what was streamed, or, where the keys come in another order,
    the value written anew."""
    if streamed is not None:
        return streamed
    try:
        call = json.loads(body)
    except ValueError:
        return None
    return json.dumps(call.get("arguments", call.get("parameters", {})), ensure_ascii=False)
