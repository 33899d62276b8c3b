"""Grammars of calls: a dialect's grammar allows what the dialect writes, and what it allows is read."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("xgrammar") is None:
    pytest.skip("needs xgrammar", allow_module_level=True)

import torch
import xgrammar

from diptych.shared.dialects.gpt_oss import GptOss
from diptych.shared.dialects.parts.tags import with_tokens
from diptych.shared.grammar.worker import compile_spec
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.tools.conformance.oracles.read_answers import read, write
from tests.dialects.test_every_dialect import any_dialect

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "enum": ["aü<", "b"]},
        "count": {"type": "integer"},
        "tree": {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]},
    },
    "required": ["text", "count"],
}
TOOLS = {"f": SCHEMA, "get": {"type": "object", "properties": {}}}
NUM_BYTES, END = 256, 256
FIRST_MARKER = 257


def compiler_of(dialect: Dialect) -> tuple[Any, dict[str, int]]:
    """With all markers as special tokens, behind the tokens of single bytes."""
    ids = {marker: FIRST_MARKER + i for i, marker in enumerate(dict.fromkeys(dialect.markers))}
    vocab = [bytes([i]) for i in range(NUM_BYTES)] + [b"\xff<end>", *(b"\xff" + m.encode() for m in ids)]
    info = xgrammar.TokenizerInfo(vocab, vocab_size=len(vocab), stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, cache_enabled=False), ids


def grammar_of(
    dialect: Dialect, tools: dict[str, Any], is_parallel: bool, is_special: bool
) -> tuple[Any, dict[str, int]]:
    compiler, ids = compiler_of(dialect)
    ids = ids if is_special else {}
    form = with_tokens(dialect.calls_format(tools, is_parallel), ids)
    tag = json.dumps({"type": "structural_tag", "format": form})
    return xgrammar.GrammarMatcher(compile_spec(compiler, "structural_tag", tag)), ids


def tokens_of(text: str, ids: dict[str, int]) -> list[int]:
    for marker, token_id in ids.items():
        text = text.replace(marker, f"\0{token_id}\0")
    parts = text.split("\0")
    return [i for k, part in enumerate(parts) for i in ([int(part)] if k % 2 else part.encode())]


def allowed(matcher: Any, num_ids: int) -> list[int]:
    mask = torch.zeros(1, -(-num_ids // 32), dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask, 0)
    return [i for i in range(num_ids) if int(mask[0, i // 32]) >> i % 32 & 1]


RIGHT, WRONG = {"text": "b", "count": 3}, {"text": "c", "count": 3}
HIDDEN = [
    '{"name": "f", "parameters": {"text": "c"}}',
    '<|python_tag|>{"name": "f", "parameters": {"text": "c"}}',
    '<|python_start|>[f(text="c")]<|python_end|>',
    "[f(text='c')]",
    '<|tool_call|>[{"name": "f", "arguments": {"text": "c"}}]<|/tool_call|>',
    "<function=f>\n<parameter=text>\nc\n</parameter>\n</function>",
    '<|channel|>commentary to=functions.f<|message|>{"text": "c"}',
    '[TOOL_CALLS]f[ARGS]{"text": "c"}',
]
"""Calls that break the schema, in the forms beside the usual one of some family."""


@any_dialect
@pytest.mark.parametrize("is_special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "several"])
def test_calls_in_a_free_text_are_constrained(dialect: Dialect, is_special: bool, is_parallel: bool) -> None:
    """A text that the grammar allows has no call that breaks its schema."""
    compiler, ids = compiler_of(dialect)
    ids = ids if is_special else {}
    form = with_tokens(dialect.optional_calls_format(TOOLS, is_parallel), ids)
    grammar = compile_spec(compiler, "structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    controls = {m: chr(0xFDD0 + i) for i, m in enumerate(ids)}

    def calls_of(text: str) -> list[dict[str, Any]] | None:
        """None: the grammar does not allow the text."""
        matcher = xgrammar.GrammarMatcher(grammar)
        if not all(matcher.accept_token(i) for i in [*tokens_of(text, ids), END]):
            return None
        for marker, control in controls.items():
            text = text.replace(marker, control)
        found = read(dialect, [text], TOOLS, "closed", controls=controls, constraint="whole")
        return [json.loads(arguments) for _, arguments in found.calls]

    call, wrong = (write(dialect, ("f", arguments)) for arguments in (RIGHT, WRONG))
    two = write(dialect, ("f", RIGHT), ("f", RIGHT))
    final = "<|channel|>final<|message|>" if isinstance(dialect, GptOss) else ""
    assert calls_of(call) == [RIGHT]
    assert calls_of(f"{final}No call.") == []
    assert calls_of(wrong) is None
    if not isinstance(dialect, GptOss):  # its turns end with a call
        assert calls_of(two) == ([RIGHT] * 2 if is_parallel else None)
    unknown = write(dialect, ("unknown", RIGHT))
    for before in (
        "",
        final,
        "Hm. ",
        " \n",
        "\xa0",
        "\u2003",
        f"{final}<think>",
        f"{call}\n",
        f"{call} Hm. ",
    ):
        for text in (call, wrong, unknown, *HIDDEN):
            assert all(each == RIGHT for each in calls_of(before + text) or ()), before + text


@any_dialect
def test_under_a_constraint_no_call_is_read_before_it_begins(dialect: Dialect) -> None:
    """A grammar that begins behind the reasoning does not hold what is inside."""
    if dialect.reasoning is None or dialect.constrains_reasoning:
        return
    call, end = write(dialect, ("f", {"text": 1})), dialect.reasoning.end
    inside = read(dialect, [f"Hm.{call}{end}So."], state="open", constraint="behind_reasoning")
    assert inside.calls == []
    assert inside.content == "So."
    assert read(dialect, [f"Hm.{call}"], state="open").calls


@any_dialect
@pytest.mark.parametrize("is_special", [False, True], ids=["plain", "special"])
def test_what_is_written_is_allowed(dialect: Dialect, is_special: bool) -> None:
    matcher, ids = grammar_of(dialect, TOOLS, True, is_special)
    arguments = {"text": "aü<", "count": 3, "tree": {"v": 1}}
    for token_id in tokens_of(write(dialect, ("f", arguments)), ids):
        assert matcher.accept_token(token_id), chr(token_id)
    assert matcher.accept_token(END)


@any_dialect
@pytest.mark.parametrize("is_special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("num_texts", [1, pytest.param(6, marks=pytest.mark.full)])
def test_what_is_allowed_is_read(
    dialect: Dialect, is_special: bool, is_parallel: bool, num_texts: int
) -> None:
    controls = (
        {m: chr(0xFDD0 + i) for i, m in enumerate(dict.fromkeys(dialect.markers))} if is_special else {}
    )
    by_id = {FIRST_MARKER + i: controls.get(m, m) for i, m in enumerate(dict.fromkeys(dialect.markers))}
    for seed in range(num_texts):
        rng, text = random.Random(seed), bytearray()
        matcher, _ = grammar_of(dialect, TOOLS, is_parallel, is_special)
        for _ in range(1500):
            found = allowed(matcher, FIRST_MARKER + len(by_id))
            # printable letters; the end as soon as it may come, but after the first call only sometimes
            letters = [i for i in found if i >= NUM_BYTES or 32 <= i < 127 or i == 10] or found
            ends = [i for i in letters if i in (END, *b'"}<\n')]
            token_id = rng.choice(ends if ends and rng.random() < 0.4 else letters)
            if token_id == END:
                break
            assert matcher.accept_token(token_id)
            text += by_id[token_id].encode() if token_id > END else bytes([token_id])
        else:
            continue  # a long text
        found_calls = read(dialect, [text.decode()], TOOLS, controls=controls)
        assert found_calls.content == ""
        assert found_calls.calls
        assert is_parallel or len(found_calls.calls) == 1
        for name, arguments in found_calls.calls:
            value = json.loads(arguments)
            assert name in TOOLS
            assert name != "f" or (type(value["count"]) is int and value["text"] in ("aü<", "b")), arguments
