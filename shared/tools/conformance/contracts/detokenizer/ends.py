"""Clauses of the detokenizer: what is held back for stop strings, and where the text ends."""

from __future__ import annotations

import re

from diptych.shared.interfaces import Detokenizer
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.token_text import (
    END,
    SmallTokenizer,
    byte_ids,
    steps_of,
    stream,
    word_ids,
)
from diptych.shared.types import (
    FinishLength,
    FinishReason,
    FinishRegex,
    FinishString,
    FinishToken,
    SamplingParams,
)

ALPHABET = "ab🙂 "


@contract(
    "Text with which a stop string may begin is held back, and is cut off with the stop string.", EXAMPLE
)
def beginning_is_held_back(impl: type[Detokenizer], case: Case) -> None:
    steps, params = steps_of(byte_ids("ab stop"), 1), SamplingParams(stop=(" stop",))
    pieces = stream(impl, SmallTokenizer(), steps, FinishString(" stop"), params)
    expect_equal("pieces", pieces, ["a", "b", "", "", "", "", ""])


@contract("What was held back comes out as soon as no stop string can begin there.", EXAMPLE)
def near_match_comes_out(impl: type[Detokenizer], case: Case) -> None:
    steps, params = steps_of(byte_ids("a stox y"), 1), SamplingParams(stop=("stop", "oxy"))
    pieces = stream(impl, SmallTokenizer(), steps, None, params)
    expect_equal("pieces", pieces, ["a", " ", "", "", "", "st", "ox ", "y"])


@contract("A stop string may begin inside a near match.", EXAMPLE)
def match_inside_a_near_match(impl: type[Detokenizer], case: Case) -> None:
    steps, params = steps_of(byte_ids("aababac"), 1), SamplingParams(stop=("abac",))
    pieces = stream(impl, SmallTokenizer(), steps, FinishString("abac"), params)
    expect_equal("pieces", pieces, ["", "a", "", "", "ab", "", ""])


@contract("What is held back at the end of the text is given out.", EXAMPLE)
def near_match_at_the_end(impl: type[Detokenizer], case: Case) -> None:
    steps, params = steps_of(byte_ids("a sto"), 1), SamplingParams(stop=("stop",))
    pieces = stream(impl, SmallTokenizer(), steps, FinishLength(5), params)
    expect_equal("pieces", pieces, ["a", " ", "", "", "sto"])


@contract(
    "Of a token that contains the stop string, the text before its first occurrence comes out.",
    table(
        "words stop expected",
        ("inside a token", ["Once", " the stop sign"], "stop", ["Once", " the "]),
        ("two occurrences", ["on", " the stop sign"], "s", ["on", " the "]),
        ("text behind it", ["one stop two"], "stop", ["one "]),
    ),
)
def stop_string_inside_a_token(impl: type[Detokenizer], case: Case) -> None:
    steps = [word_ids(word) for word in case.words]
    pieces = stream(impl, SmallTokenizer(), steps, FinishString(case.stop), SamplingParams(stop=case.stop))
    expect_equal("pieces", pieces, case.expected)


@contract(
    "With no_stop_trim nothing is held back, and the text is cut off behind the stop string.",
    table(
        "words expected",
        ("a letter a step", list("ab stop"), list("ab stop")),
        ("text behind it in its token", ["ab st", "op sign stop"], ["ab st", "op"]),
        ("all in one token", ["ab stop, stop"], ["ab stop"]),
    ),
)
def no_stop_trim(impl: type[Detokenizer], case: Case) -> None:
    steps = [word_ids(word) for word in case.words]
    params = SamplingParams(stop=(" stop",), no_stop_trim=True)
    pieces = stream(impl, SmallTokenizer(), steps, FinishString(" stop"), params)
    expect_equal("pieces", pieces, case.expected)


@contract(
    "Whatever the stop strings and the steps: the text ends before the match that begins first.",
    grid("{size} tokens per step, texts of seed {seed}", size=(1, 2, 5), seed=tuple(range(8))),
)
def any_stop_strings(impl: type[Detokenizer], case: Case) -> None:
    inputs = Inputs(case.seed)

    def text_of(length: int) -> str:
        return "".join(ALPHABET[i] for i in inputs.integers(len(ALPHABET), length).tolist())

    stops, text = tuple(text_of(length) for length in (2, 3, 4)), text_of(30)
    steps = steps_of(byte_ids(text), case.size)
    found = {match.end(): stop for stop in stops if (match := re.search(re.escape(stop), text))}
    reason: FinishReason = FinishLength(30)
    expected = text
    if found:  # the tokens end with the step in which the first stop string is complete
        num_bytes = len(text[: min(found)].encode())
        steps = steps_of(byte_ids(text)[:num_bytes], case.size)
        expected = text[: min(found)]
        first = min((expected.find(stop), stop) for stop in stops if stop in expected)
        reason, expected = FinishString(first[1]), expected[: first[0]]
    pieces = stream(impl, SmallTokenizer(), steps, reason, SamplingParams(stop=stops))
    expect_equal("the pieces together", "".join(pieces), expected)


@contract(
    "A stop token is no text; with no_stop_trim a token that has a text is shown.",
    table(
        "token params expected",
        ("special", END, {}, "ab"),
        ("special, shown otherwise", END, {"skip_special_tokens": False}, "ab"),
        ("special, kept", END, {"skip_special_tokens": False, "no_stop_trim": True}, "ab<|end|>"),
        ("special, kept but skipped", END, {"no_stop_trim": True}, "ab"),
        ("a letter", ord("z"), {}, "ab"),
        ("a letter, kept", ord("z"), {"no_stop_trim": True}, "abz"),
    ),
)
def stop_token(impl: type[Detokenizer], case: Case) -> None:
    steps, params = [byte_ids("ab"), [case.token]], SamplingParams(**case.params)
    pieces = stream(impl, SmallTokenizer(), steps, FinishToken(case.token), params)
    expect_equal("the pieces together", "".join(pieces), case.expected)


@contract("Output ids beyond finished_len have no text.", EXAMPLE)
def ids_beyond_the_end(impl: type[Detokenizer], case: Case) -> None:
    steps = [byte_ids("ab"), byte_ids("cdef")]
    pieces = stream(impl, SmallTokenizer(), steps, FinishLength(4), finished_len=4)
    expect_equal("pieces", pieces, ["ab", "cd"])


@contract(
    "With stop_regex the text comes at the end, cut off before the match; with no_stop_trim piece by piece, "
    "cut off behind it.",
    table(
        "no_stop_trim words expected",
        ("cut off", False, list("ab 12."), ["", "", "", "", "", "ab "]),
        ("kept", True, list("ab 12."), ["a", "b", " ", "1", "2", "."]),
        ("kept, text behind it", True, ["ab 1", "2. 3."], ["ab 1", "2."]),
    ),
)
def stop_regex(impl: type[Detokenizer], case: Case) -> None:
    params = SamplingParams(stop_regex=(r"\d+\.",), no_stop_trim=case.no_stop_trim)
    steps = [word_ids(word) for word in case.words]
    pieces = stream(impl, SmallTokenizer(), steps, FinishRegex(r"\d+\.", "12."), params)
    expect_equal("pieces", pieces, case.expected)
