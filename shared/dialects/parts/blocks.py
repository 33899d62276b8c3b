"""Answers of text, a block of reasoning, and blocks of calls between markers: most families' form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from diptych.shared.dialects.parts.tags import Format, between, text_without
from diptych.shared.interfaces.dialect import Dialect, NotACall, ReasoningState, Steps, Stream


class BlockDialect(Dialect):
    """Reads reasoning, text and blocks of calls. A subclass reads one block."""

    starts: tuple[str, ...] = ()
    """Markers that begin a block of calls."""
    end: str = ""
    """The marker behind a block. Text between the last call and it is left out."""
    bare: str = ""
    """Characters of which one begins a block without a marker, where the answer begins with it."""
    around: tuple[str, str] = ("", "")
    """What stands before the calls of a block and behind them, beside the markers of each."""

    @abstractmethod
    def block(self, stream: Stream, start: str) -> Steps[None]:
        """Read the calls of a block behind its marker `start` ("": there is none), up to `end`. Raises
        `NotACall`."""

    def calls_format(self, tools: Mapping[str, Any], is_parallel: bool) -> Format:
        calls = super().calls_format(tools, is_parallel)
        before, behind = self.around
        return between(before, calls, behind) if before else calls

    def optional_calls_format(self, tools: Mapping[str, Any], is_parallel: bool) -> Format:
        """Blocks begin with the first of `starts`, or without a marker where there are such ones."""
        if self.bare:
            calls = self.calls_format(tools, is_parallel)
            return {"type": "or", "elements": [calls, text_without(self.bare)]}
        tags = [self.tag(name, schema) for name, schema in tools.items()]
        before, behind = self.around
        if before:
            calls = super().calls_format(tools, is_parallel)
            tags = [{"type": "tag", "begin": before.lstrip(), "content": calls, "end": behind}]
        return {
            "type": "triggered_tags",
            "triggers": list(self.starts[:1]),
            "tags": tags,
            "stop_after_first": not is_parallel,
        }

    def _starts(self, stream: Stream, is_inside: bool) -> tuple[str, ...]:
        """Markers of a block here. Under a constraint only those whose calls it holds."""
        if not stream.tools or (is_inside and stream.constraint == "behind_reasoning"):
            return ()
        if stream.constraint == "none":
            return self.starts
        return () if self.bare else self.starts[:1]

    def read(self, stream: Stream, state: ReasoningState) -> Steps[None]:
        is_inside = self.reasoning is not None and state == "open"
        if self.reasoning is not None and state == "may_open":
            blank = yield from stream.space()
            is_inside = yield from stream.accept(self.reasoning.start)
            if is_inside:
                stream.skip_newlines()
            else:
                stream.content(blank)
        if not is_inside:
            yield from self._bare_block(stream)
        while True:
            markers = self._starts(stream, is_inside)
            if is_inside and self.reasoning is not None:
                markers = (*markers, self.reasoning.end)
            emit = stream.reasoning if is_inside else stream.content
            marker = yield from stream.until(*markers, emit=emit)
            if not marker:
                return
            if marker in self.starts:  # also inside reasoning, which a call ends
                is_inside = (
                    not (yield from stream.attempt(self._blocks(stream, marker), marker, emit)) and is_inside
                )
            else:
                is_inside = False
                stream.skip_newlines()
                yield from self._bare_block(stream)

    def _bare_block(self, stream: Stream) -> Steps[None]:
        if not self.bare or not stream.tools:
            return
        stream.content((yield from stream.space()))
        first = yield from stream.peek()
        if first and first in self.bare:
            yield from stream.attempt(self._blocks(stream, ""), "", stream.content)

    def _blocks(self, stream: Stream, start: str) -> Steps[None]:
        """A block, and others that begin before its end marker has come."""
        while True:
            try:
                yield from self.block(stream, start)
            except NotACall:
                if not stream.has_call:
                    raise
                if not start or not self.end:  # nothing says where it ends
                    yield from stream.until()
            if not start or not self.end:
                return
            start = yield from stream.until(self.end, *self.starts)
            if start not in self.starts:
                return
