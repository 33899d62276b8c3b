"""Values that Python holds in another way than JSON: every dialect that converts them writes JSON, and loses
no digit. Arguments that are JSON already pass as they are."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from diptych.shared.dialects.hermes import Hermes
from diptych.shared.dialects.parts.choose import dialects
from diptych.shared.dialects.parts.history import as_history
from diptych.shared.dialects.parts.json_calls import loads
from diptych.shared.dialects.pythonic import Pythonic
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.tools.conformance.oracles.read_answers import read, write

DIALECTS = {name: cls for name, cls in dialects().items() if name != "plain"}
PLACE = 123454321
HUGE = "9" * 5000
NUMBERS = [
    "8e2786730", "-1e400", "1e-400", "1.7976931348623159e308", "-0", HUGE, "-" + HUGE, f"1{'0' * 400}",
    "9007199254740993", "123456789012345678901234567890.5", f"[1e999, {HUGE}]", '{"a": 1e999}',
]  # fmt: skip
NO_JSON = [
    "NaN",
    "Infinity",
    "-Infinity",
    "nan",
    "inf",
    "[NaN]",
    '{"a": -Infinity}',
    "1２",
    "٣",
    "²",
    "-",
    "1e",
]
CONVERTING = ["pythonic", "qwen3_coder", "glm", "glm47", "minimax", "deepseek_v32", "deepseek_v4", "gemma4"]


def arguments_of(dialect: Dialect, value: str, types: list[str] | None = None) -> str:
    """The arguments of a call whose only argument is written so, in one piece and by characters."""
    schema: Any = {"properties": {"x": {"type": types}}} if types else True
    text = write(dialect, ("f", {"x": PLACE})).replace(str(PLACE), value)
    ((_, found),) = read(dialect, [text], {"f": schema}, "closed").calls
    assert read(dialect, list(text), {"f": schema}, "closed").calls == [("f", found)]
    return found


def exact(text: str) -> Any:
    """Numbers with all digits."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_int=Decimal, parse_float=Decimal, parse_constant=refuse)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: value[:24])
def test_a_number_keeps_its_digits(name: str, value: str) -> None:
    assert exact(arguments_of(DIALECTS[name](), value)) == {"x": exact(value)}


@pytest.mark.parametrize("name", CONVERTING)
@pytest.mark.parametrize("value", NO_JSON)
@pytest.mark.parametrize("types", [None, ["number"], ["object", "array"]], ids=str)
def test_what_is_no_number_of_json_is_a_text(name: str, value: str, types: list[str] | None) -> None:
    found = exact(arguments_of(DIALECTS[name](), value, types))["x"]
    assert isinstance(found, (str, list, dict))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax", "deepseek_v32"])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("1e3", "1000"), ("1e23", f"1{'0' * 23}"), (HUGE, HUGE),
        ("123456789012345678901.0", "123456789012345678901"),
    ],
)  # fmt: skip
def test_an_integer_is_written_out_exactly(name: str, value: str, found: str) -> None:
    assert arguments_of(DIALECTS[name](), value, ["integer"]) == f'{{"x": {found}}}'


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("+5", "5"), (".5", "0.5"), ("5.", "5.0"), ("-.5e3", "-0.5e3"), ("1_000", "1000"), ("007", "7"),
        (r"'\ud83d\ude00'", '"😀"'), (r"'\ud83d'", r'"\ud83d"'), (r"'\U0001F600'", '"😀"'),
        (r"'\U7fffffff'", '"\ufffd"'), (r"'\x22'", r'"\""'), ("x", '"x"'), ("1+2", '"1+2"'),
    ],
)  # fmt: skip
def test_numbers_and_characters_of_python(value: str, found: str) -> None:
    assert json.loads(arguments_of(Pythonic(), value)) == {"x": json.loads(found)}


def test_arguments_in_a_history_hold_what_a_prompt_can() -> None:
    """A client sends back what it was given. A template writes JSON, and the prompt is encoded as UTF-8."""
    text = f'{{"a": 8e2786730, "b": NaN, "c": {HUGE}, "d": "\\ud83d", "e": "\\ud83d\\ude00", "f": -0.0}}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    (message,) = as_history(Hermes(), [{"role": "assistant", "content": None, "tool_calls": [call]}])
    found = message["tool_calls"][0]["function"]["arguments"]
    assert found == {"a": "8e2786730", "b": "NaN", "c": HUGE, "d": "?", "e": "😀", "f": 0.0}
    assert json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    assert loads(json.dumps(found)) == found
