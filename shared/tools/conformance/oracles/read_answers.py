"""What a dialect reads from a text that is cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from diptych.shared.dialects.parts.answer_parser import AnswerParser, Piece
from diptych.shared.interfaces.dialect import Call, Constraint, Dialect, ReasoningState


class Read(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]  # name, arguments


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def read(
    dialect: Dialect,
    parts: list[str],
    tools: Mapping[str, Any] | None = None,
    state: ReasoningState = "may_open",
    max_calls: int | None = None,
    is_cut: bool = False,
    controls: Mapping[str, str] | None = None,
    constraint: Constraint = "none",
) -> Read:
    """Asserts that a call's id and name come once and first, and that ids differ."""
    tools = tools if tools is not None else {"f": True}
    parser = AnswerParser(dialect, tools, state, max_calls, controls, constraint)
    found, ids = Read("", "", []), set[str]()
    for events in [*map(parser.feed, parts), parser.finish(is_cut)]:
        for event in events:
            if isinstance(event, Piece):
                assert event.text
                found = found._replace(**{event.kind: getattr(found, event.kind) + event.text})
            elif event.index == len(found.calls):
                assert event.name
                assert event.call_id
                assert event.call_id not in ids
                ids.add(event.call_id)
                found.calls.append((event.name, event.arguments))
            else:
                assert event.name is event.call_id is None
                name, arguments = found.calls[event.index]
                found.calls[event.index] = name, arguments + event.arguments
    return found


def write(dialect: Dialect, *calls: tuple[str, dict[str, Any]]) -> str:
    return dialect.write([Call(name, arguments, f"call{i:05}") for i, (name, arguments) in enumerate(calls)])
