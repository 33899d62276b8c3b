"""Clauses of the detokenizer: text and characters."""

from __future__ import annotations

from itertools import accumulate

from diptych.shared.interfaces import Detokenizer
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.token_text import (
    END,
    FIRST_WORD,
    REPLACEMENT,
    VOCAB_SIZE,
    SmallTokenizer,
    byte_ids,
    steps_of,
    stream,
    word_ids,
)
from diptych.shared.types import FinishLength, SamplingParams

PLAIN = "Once upon a time there was a stop sign,\n  and two spaces."
CHARACTERS = "naïve café, 你好世界, 🙂🙃 Ünïcödé — done"
MAX_DECODED = 60
"""Ids decoded for one token, on average: some for its context, more for bytes that form no character."""

SIZES = grid("{size} tokens per step, {kind}", size=(1, 2, 3, 7), kind=("words", "bytes"))


@contract("All pieces together are the decoded text.", SIZES)
def pieces_are_the_text(impl: type[Detokenizer], case: Case) -> None:
    tokenizer = SmallTokenizer()
    ids = word_ids(PLAIN) if case.kind == "words" else byte_ids(PLAIN)
    pieces = stream(impl, tokenizer, steps_of(ids, case.size), FinishLength(len(ids)))
    expect_equal("the pieces together", "".join(pieces), PLAIN)


@contract("Text that is certain comes in the step of its tokens; a step without tokens gives none.", EXAMPLE)
def text_comes_in_its_step(impl: type[Detokenizer], case: Case) -> None:
    steps = [word_ids(text) for text in ("Once", " upon", "", " a time", ".")]
    pieces = stream(impl, SmallTokenizer(), steps)
    expect_equal("pieces", pieces, ["Once", " upon", "", " a time", "."])


@contract(
    "The prompt is context: none of its text comes out, and the space of the first word stays.",
    table(
        "prompt is_fallback",
        ("words", "Once upon", True),
        ("a character that the prompt began", "你好"[:1], False),
        ("characters of several bytes", "你好你好你好", True),
        ("no prompt", "", False),
    ),
)
def prompt_is_context(impl: type[Detokenizer], case: Case) -> None:
    tokenizer = SmallTokenizer(is_fallback=case.is_fallback)
    for num_cut in range(3 if case.prompt.startswith("你") and not case.is_fallback else 1):
        prompt = word_ids(case.prompt)[num_cut:]
        pieces = stream(impl, tokenizer, [word_ids(" a"), word_ids(" time")], prompt=prompt)
        expect_equal("pieces", pieces, [" a", " time"])


@contract(
    "Special tokens have no text, unless skip_special_tokens is False.",
    table("skip expected", ("skipped", True, ["a", "", "b"]), ("shown", False, ["a", "<|end|>", "b"])),
)
def special_tokens(impl: type[Detokenizer], case: Case) -> None:
    steps = [byte_ids("a"), [END], byte_ids("b")]
    params = SamplingParams(skip_special_tokens=case.skip)
    expect_equal("pieces", stream(impl, SmallTokenizer(), steps, params=params), case.expected)


@contract(
    "A character whose bytes are in several tokens comes whole, in the step of its last byte.",
    grid("byte fallback: {is_fallback}", is_fallback=(False, True)),
)
def characters_come_whole(impl: type[Detokenizer], case: Case) -> None:
    tokenizer = SmallTokenizer(is_fallback=case.is_fallback)
    pieces = stream(impl, tokenizer, steps_of(byte_ids(CHARACTERS), 1))
    expected = [part for char in CHARACTERS for part in [*[""] * (len(char.encode()) - 1), char]]
    expect_equal("pieces", pieces, expected)


@contract(
    "Steps of several tokens that end inside a character give out the whole characters before it.",
    grid(
        "{size} tokens per step, byte fallback: {is_fallback}",
        size=(2, 3, 5, 6, 7),
        is_fallback=(False, True),
    ),
)
def steps_end_inside_characters(impl: type[Detokenizer], case: Case) -> None:
    tokenizer, text = SmallTokenizer(is_fallback=case.is_fallback), "🙂🙃" * 8
    steps = steps_of(byte_ids(text), case.size)
    pieces = stream(impl, tokenizer, steps, FinishLength(len(byte_ids(text))))
    expect_equal("the pieces together", "".join(pieces), text)
    ends = [min(case.size * (n + 1), 4 * len(text)) // 4 for n in range(len(steps))]
    expect_equal("characters given out", [*accumulate(map(len, pieces))], ends)


@contract("A text that ends inside a character ends with U+FFFD.", EXAMPLE)
def end_inside_a_character(impl: type[Detokenizer], case: Case) -> None:
    steps = steps_of(byte_ids("a🙂")[:-1], 1)
    pieces = stream(impl, SmallTokenizer(), steps, FinishLength(len(steps)))
    expect_equal("pieces", pieces, ["a", "", "", REPLACEMENT])


@contract("U+FFFD that the model has written is text.", EXAMPLE)
def replacement_characters_of_the_text(impl: type[Detokenizer], case: Case) -> None:
    text = f"a{REPLACEMENT}b{REPLACEMENT}"
    ids = byte_ids(text)
    pieces = stream(impl, SmallTokenizer(), steps_of(ids, 1), FinishLength(len(ids)))
    expect_equal("the pieces together", "".join(pieces), text)


@contract(
    "Any ids, also bytes that form no character: the pieces together are the decoded text.",
    grid("{size} tokens per step, ids of seed {seed}", size=(1, 2, 4), seed=tuple(range(6))),
)
def any_ids(impl: type[Detokenizer], case: Case) -> None:
    ids = Inputs(case.seed).integers(VOCAB_SIZE, 60).tolist()
    tokenizer = SmallTokenizer()
    pieces = stream(impl, tokenizer, steps_of(ids, case.size), FinishLength(len(ids)))
    expect_equal("the pieces together", "".join(pieces), tokenizer.decode(ids, skip_special_tokens=True))


@contract(
    "The cost of a token does not depend on the length of the text, nor on bytes that form no character.",
    table(
        "unit",
        ("a letter", "x"),
        ("a character of four bytes", "🙂"),
        ("a word", " time"),
        ("no character", ""),
    ),
)
def cost_of_a_token(impl: type[Detokenizer], case: Case) -> None:
    unit, num_tokens, tokenizer = word_ids(case.unit) or [0xFF], 600, SmallTokenizer()
    ids = (unit * num_tokens)[:num_tokens]
    prompt = [FIRST_WORD] * 2000
    pieces = stream(impl, tokenizer, steps_of(ids, 1), FinishLength(num_tokens), prompt=prompt)
    num_decoded = tokenizer.num_decoded
    expect_true(
        f"{num_decoded / num_tokens:.0f} ids decoded per token, at most {MAX_DECODED}",
        num_decoded <= MAX_DECODED * num_tokens,
    )
    expect_equal("the pieces together", "".join(pieces), SmallTokenizer().decode(ids))
