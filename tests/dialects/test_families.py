"""What is particular to a family: forms that its models write, ids and histories that its templates take."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.dialects.deepseek_v3 import DeepSeekV3
from diptych.shared.dialects.deepseek_v31 import DeepSeekV31
from diptych.shared.dialects.deepseek_v32 import DeepSeekV32
from diptych.shared.dialects.gemma4 import Gemma4
from diptych.shared.dialects.glm import Glm
from diptych.shared.dialects.hermes import Hermes
from diptych.shared.dialects.kimi import Kimi
from diptych.shared.dialects.minimax import MiniMax
from diptych.shared.dialects.mistral import Mistral
from diptych.shared.dialects.mistral_args import MistralArgs
from diptych.shared.dialects.parts.choose import detect
from diptych.shared.dialects.phi4 import Phi4
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.tools.conformance.oracles.read_answers import read
from tests.text.make import byte_level

V3_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
V31_CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
F = ("f", '{"a": 1}')
JSON_CALL = '{"name": "f", "arguments": {"a": 1}}'
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}

FORMS: list[tuple[type[Dialect], str, str, list[tuple[str, str]]]] = [
    # as published templates write several calls; text before them is content
    (DeepSeekV3, f"A <｜tool▁calls▁begin｜>{V3_CALL}\n{V3_CALL}<｜tool▁calls▁end｜>", "A", [F, F]),
    (DeepSeekV31, f"A<｜tool▁calls▁begin｜>{V31_CALL}{V31_CALL}<｜tool▁calls▁end｜>", "A", [F, F]),
    # without its last markers
    (DeepSeekV31, f"<｜tool▁calls▁begin｜>{V31_CALL}", "", [F]),
    # a parameter says itself whether it is a text
    (
        DeepSeekV32,
        'A\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="s" string="true">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "A",
        [("f", '{"a": 1, "s": "1"}')],
    ),
    # the tool's schema says it: s is a text, whatever it looks like
    (
        MiniMax,
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="s">1'
        '</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        "",
        [("f", '{"a": 1, "s": "1"}'), ("f", "{}")],
    ),
    # GLM-4.7 writes no newlines
    (
        Glm,
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>1</arg_value>"
        "</tool_call><tool_call>f</tool_call>",
        "",
        [("f", '{"a": 1, "s": "1"}'), ("f", "{}")],
    ),
    (Mistral, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", [F]),
    (Mistral, '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [F]),  # --tool-call-parser mistral, and a newer model
    (MistralArgs, 'A[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}', "A", [F, F]),
    (Phi4, f"functools[{JSON_CALL}, {JSON_CALL}]", "", [F, F]),
    (Phi4, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "", [F]),
    # nested, with a text that holds what ends a value
    (
        Gemma4,
        '<|tool_call>call:f{a:{b:[1,<|"|>x},]<|"|>,null],c:{}},d:true}<tool_call|><|tool_call>call:f{}<tool_call|>',
        "",
        [("f", '{"a": {"b": [1, "x},]", null], "c": {}}, "d": true}'), ("f", "{}")],
    ),
    (Gemma4, '<|tool_call>call:f{"a":"x, y"}<tool_call|>', "", [("f", '{"a": "x, y"}')]),  # JSON
    # what is no call stays content
    (Glm, "<tool_call>is how a call begins</tool_call>", "<tool_call>is how a call begins</tool_call>", []),
    (Phi4, "from functools[0] import", "from functools[0] import", []),
    (Gemma4, "<|tool_call>f{}", "<|tool_call>f{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), FORMS, ids=range(len(FORMS)))
def test_forms(dialect: type[Dialect], text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cut in range(len(text)):
        found = read(dialect(), [text[:cut], text[cut:]], TOOLS)
        assert (found.content, found.calls) == (content, calls), cut


def conversation(*ids: Any) -> list[dict[str, Any]]:
    """One call and its result for each id."""
    return [
        message
        for call_id in ids
        for message in (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "function": {"name": "f", "arguments": {}}}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": "R"},
        )
    ]


def ids_in(messages: list[dict[str, Any]]) -> list[str]:
    return [
        message["tool_call_id"] if "tool_call_id" in message else message["tool_calls"][0]["id"]
        for message in messages
    ]


def test_kimi_numbers_calls_through_the_conversation() -> None:
    dialect = Kimi()
    found = ids_in(dialect.history(conversation("call_a", "functions.f:0", "functions.f:9")))
    assert found == [f"functions.f:{i // 2}" for i in range(6)]
    text = '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"a": 1}'
    assert read(dialect, [text], TOOLS).calls == [F]


def test_mistral_ids_have_nine_letters_on_both_sides() -> None:
    a, same, b, other = ids_in(Mistral().history(conversation("call_1234567890", "call_1234567891")))
    assert a == same != b == other
    assert all(len(text) == 9 and text.isalnum() for text in (a, b, Mistral().new_id("f", 0)))
    assert ids_in(Mistral().history(conversation("abcDEF123"))) == ["abcDEF123"] * 2


def test_smollm3_has_another_name_for_tools() -> None:
    tokenizer = byte_level.__wrapped__()  # one of its own
    tokenizer.hf_tokenizer.chat_template = (
        "{% for tool in xml_tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    assert isinstance(detect(tokenizer), Hermes)
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.render([{"role": "user", "content": "Hi"}], tools=tools)
    assert text == '{"type": "function", "function": {"name": "f"}}Hi'
