"""Clauses of a dialect: what it writes it reads, however an answer is cut, and nothing else is a call."""

from __future__ import annotations

import json
import time
from typing import Any

from diptych.shared.dialects.parts.answer_parser import AnswerParser, ToolDelta
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_equal
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.read_answers import Read, pieces, read, write

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
STATES = grid("{state}", state=("may_open", "open", "closed"))


@contract(
    "A call that the dialect writes is read with the same values, however the answer is cut into pieces.",
    grid(
        "{names}, pieces of seed {seed}",
        names=(("text",), ("digits", "count"), tuple(VALUES), ()),
        seed=(0, 1, 2),
    ),
)
def written_calls_are_read(impl: type[Dialect], case: Case) -> None:
    arguments = {name: VALUES[name] for name in case.names}
    text = write(impl(), ("f", arguments))
    cuts = Inputs(case.seed).integers(len(text), 12).tolist()
    found = read(impl(), pieces(text, cuts), TOOLS)
    expect_equal("names", [name for name, _ in found.calls], ["f"])
    expect_equal("arguments", json.loads(found.calls[0][1]), arguments)
    expect_equal("content and reasoning", found[:2], ("", ""))


@contract("An answer of one character at a time, or cut anywhere, is read as the whole answer is.", STATES)
def every_cut_reads_the_same(impl: type[Dialect], case: Case) -> None:
    dialect = impl()
    text = dialect.write_answer("Hm.\n", "So.\n") + write(dialect, ("f", VALUES), ("g", {"a": 1}))
    whole = read(dialect, [text], TOOLS, case.state)
    expect_equal("by characters", read(dialect, list(text), TOOLS, case.state), whole)
    for cut in range(len(text)):
        expect_equal(f"cut at {cut}", read(dialect, [text[:cut], text[cut:]], TOOLS, case.state), whole)


@contract("Reasoning and content come apart, whether the prompt has opened the reasoning or not.", STATES)
def reasoning_comes_apart(impl: type[Dialect], case: Case) -> None:
    dialect = impl()
    if dialect.reasoning is None or (case.state == "closed" and dialect.free_text("closed") is None):
        return
    text = dialect.write_answer("Two <= three.", "It is 42.")
    text = text.removeprefix(dialect.reasoning.start) if case.state == "open" else text
    found = read(dialect, list(text), TOOLS, case.state)
    expect_equal("answer", found, Read("It is 42.", "Two <= three.", []))


@contract(
    "An answer that is cut off at any place leaks no markup, and keeps what was given out of a call.", EXAMPLE
)
def cut_answers_leak_nothing(impl: type[Dialect], case: Case) -> None:
    dialect = impl()
    text = write(dialect, ("f", VALUES))
    (whole,) = read(dialect, [text], TOOLS).calls
    for end in range(len(text)):
        found = read(dialect, [text[:end]], TOOLS, is_cut=True)
        if len(found.content) >= len(" to=functions.") or found.reasoning:  # a header without a marker
            raise Mismatch(f"content of the first {end} characters", "", found.content)
        for _, arguments in found.calls:
            expect_equal(f"arguments of the first {end} characters", whole[1][: len(arguments)], arguments)


@contract(
    "Text without a call is content as it is.",
    table(
        "text",
        ("nothing", ""),
        ("prose", "No call."),
        ("brackets", "a < b, [1] {2}"),
        ("white space", "  white space \n"),
        ("code", "f(x)"),
        ("a list", "[f, g]"),
        ("an object", '{"f": 1}'),
    ),
)
def prose_is_content(impl: type[Dialect], case: Case) -> None:
    expect_equal("answer", read(impl(), list(case.text), TOOLS), Read(case.text, "", []))


@contract("White space around a call is left out, other text around it is content.", EXAMPLE)
def text_around_calls(impl: type[Dialect], case: Case) -> None:
    dialect = impl()
    call = write(dialect, ("f", {"count": 1}))
    found = read(dialect, list(f"{call} \n\n"), TOOLS)
    expect_equal("answer", found, Read("", "", [("f", found.calls[0][1])]))


@contract("Without tools a request gets no call.", EXAMPLE)
def no_tools_no_calls(impl: type[Dialect], case: Case) -> None:
    dialect = impl()
    expect_equal("calls", read(dialect, [write(dialect, ("f", {"count": 1}))], {}).calls, [])


@contract("Of several calls at most `max_calls` are given out.", grid("{limit} calls", limit=(1, 2, None)))
def calls_beyond_the_limit(impl: type[Dialect], case: Case) -> None:
    dialect = impl()
    calls = [("f", {"count": 1}), ("g", {}), ("f", {"count": 2})]
    found = read(dialect, list(write(dialect, *calls)), TOOLS, max_calls=case.limit).calls
    expect_equal("calls", [(name, json.loads(text)) for name, text in found], calls[: case.limit])


@contract("Arguments are given out while they come.", EXAMPLE)
def arguments_stream(impl: type[Dialect], case: Case) -> None:
    text = write(impl(), ("f", {"text": "a" * 1000}))
    parser = AnswerParser(impl(), TOOLS, "may_open")
    events = parser.feed(text[: text.rindex("a") - 50])
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolDelta))
    if arguments.count("a") < 900:
        raise Mismatch("characters before the call has ended", "at least 900", arguments.count("a"))


@contract("A special marker counts as its token; the same letters in text are text.", EXAMPLE)
def special_markers_are_tokens(impl: type[Dialect], case: Case) -> None:
    dialect = impl()
    controls = {marker: chr(0xFDD0 + i) for i, marker in enumerate(dict.fromkeys(dialect.markers))}
    text = write(dialect, ("f", {"text": "a"}))
    found = read(dialect, ["See: ", *dialect.markers], TOOLS, "closed", controls=controls)
    expect_equal("spelled out", found, Read("See: " + "".join(dialect.markers), "", []))
    for marker, char in controls.items():
        text = text.replace(marker, char)
    expect_equal("calls", len(read(dialect, list(text), TOOLS, controls=controls).calls), 1)


@contract(
    "A call takes time in proportion to its length: 256 KiB take less than a second.",
    grid("{key}, pieces of {size}", key=("text", "list"), size=(16, 1024)),
)
def linear_time(impl: type[Dialect], case: Case) -> None:
    values = {"text": "a quick brown fox, " * (2**18 // 19), "list": ["a quick brown fox"] * (2**18 // 21)}
    text = write(impl(), ("f", {case.key: values[case.key]}))
    parser = AnswerParser(impl(), TOOLS, "may_open")
    start, events = time.thread_time(), []
    for i in range(0, len(text), case.size):
        events += parser.feed(text[i : i + case.size])
    events += parser.finish()
    seconds = time.thread_time() - start
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolDelta))
    if json.loads(arguments) != {case.key: values[case.key]}:  # a quarter of a megabyte: not in a report
        raise Mismatch("arguments", "the values that were written", "others")
    if seconds > 1:
        raise Mismatch("seconds", "less than 1", round(seconds, 2))
