"""What holds for each dialect: what it writes it reads, however the text is cut, in linear time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from diptych.shared.dialects.parts.answer_parser import AnswerParser
from diptych.shared.dialects.parts.choose import dialects
from diptych.shared.interfaces.dialect import Dialect
from tests.dialects.reading import pieces, read, write
from tests.properties import given, st

DIALECTS = [cls() for name, cls in dialects().items() if name != "plain"]
VALUES: dict[str, Any] = {
    "text": 'a "quoted" \\ ü 🙂 {[}] </x> \n two',
    "digits": "123",
    "count": 3,
    "share": 0.5,
    "flag": True,
    "nothing": None,
    "list": [1, "b", {"c": []}],
    "object": {"d": {"e": "f"}},
    "empty": "",
}
SCHEMA = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("text", "digits", "empty")},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "nothing": {"type": ["null", "integer"]},
        "list": {"type": "array"},
        "object": {"type": "object"},
    },
}
TOOLS = {"f": SCHEMA, "g": True}
any_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: type(dialect).__name__)


@any_dialect
@given(
    st.lists(st.integers(0, 3000), max_size=20),
    st.sampled_from([["text"], ["digits", "count"], list(VALUES), []]),
)
def test_what_is_written_is_read(dialect: Dialect, cuts: list[int], names: list[str]) -> None:
    arguments = {name: VALUES[name] for name in names}
    found = read(dialect, pieces(write(dialect, ("f", arguments)), cuts), TOOLS)
    assert [(name, json.loads(text)) for name, text in found.calls] == [("f", arguments)]
    assert found.content == found.reasoning == ""


@any_dialect
@given(st.lists(st.integers(0, 3000), max_size=20))
def test_reasoning_text_and_calls(dialect: Dialect, cuts: list[int]) -> None:
    text = write(dialect, ("f", {"text": "a"}), ("g", {}))
    whole = read(dialect, [text], TOOLS)
    if len(whole.calls) == 2:  # some families call once in a turn
        found = read(dialect, pieces(text, cuts), TOOLS)
        assert [(name, json.loads(text)) for name, text in found.calls] == [("f", {"text": "a"}), ("g", {})]


@any_dialect
def test_every_cut_reads_the_same(dialect: Dialect) -> None:
    text = write(dialect, ("f", VALUES))
    if dialect.reasoning is not None and dialect.reasoning.start in dialect.markers:
        text = f"{dialect.reasoning.start}Hm{dialect.reasoning.end}{text}"
    whole = read(dialect, [text], TOOLS)
    assert whole == read(dialect, list(text), TOOLS)
    for cut in range(len(text)):
        assert read(dialect, [text[:cut], text[cut:]], TOOLS) == whole


@any_dialect
def test_every_end_is_a_beginning_of_the_whole(dialect: Dialect) -> None:
    """An answer that is cut by its length leaks no markup, and arguments are never taken back."""
    text = write(dialect, ("f", VALUES))
    (whole,) = read(dialect, [text], TOOLS).calls
    for end in range(len(text)):
        found = read(dialect, [text[:end]], TOOLS, is_cut=True)
        assert all(whole[1].startswith(arguments) for _, arguments in found.calls), end
        assert found.reasoning == "", end
        assert len(found.content) < len(" to=functions."), end  # harmony: a header without a marker


@any_dialect
@pytest.mark.parametrize("text", ["", "No call.", "a < b, [1] {2}", "  white space \n", "f(x)"])
def test_prose_is_content(dialect: Dialect, text: str) -> None:
    assert read(dialect, list(text), TOOLS) == (text, "", [])


@any_dialect
@pytest.mark.parametrize("size", [10**9, 4])
def test_a_mebibyte_of_arguments_takes_less_than_a_second(dialect: Dialect, size: int) -> None:
    arguments = {"text": "a quick brown fox, " * (2**20 // 19)}
    text = write(dialect, ("f", arguments))
    parser = AnswerParser(dialect, TOOLS, "may_open")
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    start = time.thread_time()
    events = [event for part in parts for event in parser.feed(part)] + parser.finish()
    seconds = time.thread_time() - start
    assert (
        json.loads("".join(event.arguments for event in events if hasattr(event, "arguments"))) == arguments
    )
    assert seconds < (1 if size > 100 else 4)  # the second one also makes 260,000 events
