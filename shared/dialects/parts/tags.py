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
    if form.get("type") == "triggered_tags":
        form = _triggered(form, ids)
    form = {
        key: value if key in ("begin", "end", "value") else with_tokens(value, ids)
        for key, value in form.items()
    }
    if form.get("type") == "const_string":
        return _sequence(_pieces(form["value"], ids))
    if form.get("type") != "tag":
        return form
    begin, end = _pieces(form["begin"], ids), _pieces(form["end"], ids)
    content = _sequence([*begin[1:], form["content"], *end[:-1]])
    return {**form, "begin": _edge(begin[0]), "content": content, "end": _edge(end[-1])}


def _triggered(form: Format, ids: Mapping[str, int]) -> Format:
    """Tags with a special marker in their trigger: its token triggers them. What is before it is text."""
    (trigger,) = form["triggers"]
    found = min((marker for marker in ids if marker in trigger), key=trigger.index, default=None)
    if found is None:
        return form
    at = trigger.index(found)
    tags = [{**tag, "begin": tag["begin"][at:]} for tag in form["tags"]]
    rest = {key: value for key, value in form.items() if key != "triggers"}
    return {**rest, "type": "token_triggered_tags", "trigger_tokens": [ids[found]], "tags": tags}


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


SPACES = r" \t\n\r"
OTHER_SPACES = r"\x0b\x0c\x1c-\x1f\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def text_without(first: str) -> Format:
    """Any text whose first character, behind white space, is none of `first`."""
    start = f"[{SPACES}]*[^{SPACES}{OTHER_SPACES}{re.escape(first)}]"
    text = [{"type": "regex", "pattern": start}, {"type": "any_text"}]
    return {"type": "optional", "content": {"type": "sequence", "elements": text}}


def between(begin: str, form: Format, end: str) -> Format:
    """A format with constant texts around it."""
    edges = [{"type": "const_string", "value": text} for text in (begin, end)]
    return {"type": "sequence", "elements": [edges[0], form, edges[1]]}
