"""One choice of a chat answer: its deltas as the dialect reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from diptych.shared.dialects.parts.answer_parser import AnswerParser, Piece, ToolDelta
from diptych.shared.interfaces.dialect import Constraint, Dialect, ReasoningState
from diptych.shared.server.api.protocol import ChatRequest
from diptych.shared.server.engine.engine_client import Delta
from diptych.shared.server.engine.messages import Finish
from diptych.shared.text.tokenizer import Tokenizer

MAX_CHARS = 1024
"""Read at one time: at most a few milliseconds of the event loop's time."""


class AnswerForm(NamedTuple):
    """How the answers of one request are read."""

    dialect: Dialect
    state: ReasoningState
    tools: dict[str, Any]  # name -> schema of the arguments; empty: no calls
    max_calls: int | None
    controls: dict[str, str]  # special marker -> its character
    marker_ids: dict[str, int]  # special marker -> its token
    constraint: Constraint = "none"

    def parser(self) -> AnswerParser:
        """For one answer."""
        return AnswerParser(
            self.dialect, self.tools, self.state, self.max_calls, self.controls, self.constraint
        )


class ChatChoice:
    """The parser of one choice, and what it has given so far."""

    def __init__(self, index: int, body: ChatRequest, form: AnswerForm, counter: ReasoningCounter) -> None:
        self.index = index
        self.num_top = (body.top_logprobs or 0) if body.logprobs else None
        self.parser = form.parser()
        self.counter = counter

    async def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """The `delta` objects of a piece, and what the parser held back when it is the last. Other requests
        get their turn between the parts of a long text."""
        self.counter.add(delta.token_ids)
        return [self._body(event) async for event in self._events(delta)]

    async def _events(self, delta: Delta) -> AsyncIterator[Piece | ToolDelta]:
        for start in range(0, len(delta.text), MAX_CHARS):
            if start:
                await asyncio.sleep(0)
            for event in self.parser.feed(delta.text[start : start + MAX_CHARS]):
                yield event
        if delta.finish is not None:
            for event in self.parser.finish(is_cut=delta.finish.kind == "length"):
                yield event

    def _body(self, event: Piece | ToolDelta) -> dict[str, Any]:
        if isinstance(event, Piece) and event.kind == "reasoning":
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, Piece):
            return {"content": event.text}
        entry: dict[str, Any] = {"index": event.index, "function": {"arguments": event.arguments}}
        if event.name is not None:
            function = {"name": event.name, "arguments": event.arguments}
            entry = {"index": event.index, "id": event.call_id, "type": "function", "function": function}
        return {"tool_calls": [entry]}

    def finish_reason(self, finish: Finish) -> str:
        return "tool_calls" if finish.kind == "stop" and self.parser.num_calls else finish.kind


class ReasoningCounter:
    """Counts the tokens of reasoning, its markers included."""

    def __init__(self, form: AnswerForm, tokenizer: Tokenizer | None) -> None:
        markers = (form.dialect.reasoning or ())[:2] if tokenizer is not None else ()
        self._markers = [tokenizer.encode(marker, False) for marker in markers] if tokenizer else []
        self._is_inside = form.state == "open"
        self._last: list[int] = []
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        if not self._markers:
            return
        start, end = self._markers
        for token_id in token_ids:
            self._last = [*self._last[-8:], token_id]
            self.num_tokens += self._is_inside
            if not self._is_inside and self._last[-len(start) :] == start:
                self._is_inside = True
                self.num_tokens += len(start)
            elif self._is_inside and self._last[-len(end) :] == end:
                self._is_inside = False
