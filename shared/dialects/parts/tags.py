"""Grammars of calls: xgrammar formats in which special markers are tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Format = dict[str, Any]


def with_tokens(form: Any, ids: Mapping[str, int]) -> Any:
    """A format whose texts hold no special marker: the marker's token stands in its place. ids: special
    marker -> token id."""
    if isinstance(form, list):
        return [with_tokens(each, ids) for each in form]
    if not isinstance(form, dict) or not ids or form.get("type") == "json_schema":
        return form
    form = {
        key: value if key in ("begin", "end", "value") else with_tokens(value, ids)
        for key, value in form.items()
    }
    if form.get("type") == "const_string":
        return _sequence(_pieces(form["value"], ids))
    if form.get("type") == "triggered_tags" and set(form["triggers"]) <= ids.keys():
        triggers = [ids[trigger] for trigger in form.pop("triggers")]
        return {**form, "type": "token_triggered_tags", "trigger_tokens": triggers}
    if form.get("type") != "tag":
        return form
    begin, end = _pieces(form["begin"], ids), _pieces(form["end"], ids)
    content = _sequence([*begin[1:], form["content"], *end[:-1]])
    return {**form, "begin": _edge(begin[0]), "content": content, "end": _edge(end[-1])}


def _pieces(text: str, ids: Mapping[str, int]) -> list[Format]:
    """The text as constant texts and tokens; at least one piece."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text)
    pieces = [
        {"type": "token", "token": ids[part]} if part in ids else {"type": "const_string", "value": part}
        for part in parts
        if part
    ]
    return pieces or [{"type": "const_string", "value": ""}]


def _edge(piece: Format) -> Any:
    """A piece as the begin or end of a tag."""
    return piece if piece["type"] == "token" else piece["value"]


def _sequence(pieces: list[Format]) -> Format:
    pieces = [piece for piece in pieces if piece.get("value") != ""] or pieces[:1]
    return pieces[0] if len(pieces) == 1 else {"type": "sequence", "elements": pieces}


def between(begin: str, form: Format, end: str) -> Format:
    """A format with constant texts around it."""
    edges = [{"type": "const_string", "value": text} for text in (begin, end)]
    return {"type": "sequence", "elements": [edges[0], form, edges[1]]}
