"""Which dialect a model speaks: by its template, its vocabulary, or a flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.dialects.glm import Glm
from diptych.shared.dialects.glm47 import Glm47
from diptych.shared.dialects.gpt_oss import GptOss
from diptych.shared.dialects.hermes import Hermes
from diptych.shared.dialects.llama3 import Llama3
from diptych.shared.dialects.parts.choose import (
    carries_name,
    choose_dialect,
    dialect_of,
    dialects,
    reasoning_state,
)
from diptych.shared.dialects.plain import Plain
from diptych.shared.dialects.pythonic import Pythonic
from diptych.shared.dialects.qwen3_coder import Qwen3Coder
from diptych.shared.text.tokenizer import Tokenizer
from tests.text.make import EOS, byte_level

NAME, ARGUMENTS = "{{ t.function.name }}", "{{ t.function.arguments|tojson }}"
EACH = "{% for k, v in t.function.arguments|items %}"
CALLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for t in m.tool_calls or [] %}%s{% endfor %}\n{% endfor %}"
)
FORMS = {
    Hermes: f'<tool_call>{{"name": "{NAME}", "arguments": {ARGUMENTS}}}</tool_call>',
    Qwen3Coder: f"<tool_call><function={NAME}>{EACH}<parameter={{{{ k }}}}>{{{{ v }}}}</parameter>"
    "{% endfor %}</function></tool_call>",
    Glm: f"<tool_call>{NAME}\n{EACH}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{{{{ v }}}}</arg_value>\n"
    "{% endfor %}</tool_call>",
    Glm47: f"<tool_call>{NAME}{EACH}<arg_key>{{{{ k }}}}</arg_key><arg_value>{{{{ v }}}}</arg_value>"
    "{% endfor %}</tool_call>",
    Llama3: f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}',
    GptOss: f" to=functions.{NAME}<|channel|>commentary json<|message|>{ARGUMENTS}",
    Pythonic: f"[{NAME}({EACH}{{{{ k }}}}={{{{ v|tojson }}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}})]",
}


def tokenizer_with(template: str | None, *tokens: str) -> Tokenizer:
    raw = byte_level().hf_tokenizer.backend_tokenizer
    raw = type(raw).from_str(raw.to_str())
    raw.add_tokens(list(tokens))
    kind = type(byte_level().hf_tokenizer)
    return Tokenizer(kind(tokenizer_object=raw, eos_token=EOS, chat_template=template))


@pytest.mark.parametrize("dialect", FORMS)
def test_the_form_of_a_call_in_the_template_decides(dialect: type) -> None:
    """Whatever words of other families stand in it."""
    words = "{# <tool_call> <|python_tag|> <|channel|> <function= <parameter= #}"
    template = words + CALLS.replace("%s", FORMS[dialect])
    assert type(choose_dialect(tokenizer_with(template))) is dialect


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("Use <tool_call>.{{ raise_exception('no tools') }}", Hermes),
        ("Use <function=f> and <parameter=x>.{{ raise_exception('no tools') }}", Qwen3Coder),
        ("{{ raise_exception('no tools') }} ipython", Llama3),
        ("{{ messages[0].content }}", Plain),
    ],
)
def test_words_decide_where_no_call_is_shown(template: str, dialect: type) -> None:
    assert type(choose_dialect(tokenizer_with(template))) is dialect


def test_a_vocabulary_decides_where_there_is_no_template() -> None:
    assert type(choose_dialect(tokenizer_with(None, "<tool_call>"))) is Hermes
    assert type(choose_dialect(tokenizer_with(None, "<|channel|>", "<|constrain|>"))) is GptOss
    assert type(choose_dialect(tokenizer_with(None))) is Plain
    assert type(choose_dialect(None)) is Plain


def test_flags_decide(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from diptych.shared.dialects.hermes import Hermes\nclass Mine(Hermes): pass\n")
    tokenizer = tokenizer_with("{{ messages[0].content }}", "<think>")
    assert type(dialect_of(EngineConfig(tool_call_parser="llama3"), tokenizer)) is Llama3
    assert type(dialect_of(EngineConfig(use={"dialect": f"{own}:Mine"}), tokenizer)).__name__ == "Mine"
    thinking = choose_dialect(tokenizer, "llama3", "deepseek-r1")
    assert reasoning_state(thinking, "") == "open"
    assert choose_dialect(tokenizer, "llama3").reasoning == Hermes.reasoning, "the vocabulary has its marker"
    assert choose_dialect(tokenizer, "hermes", "none").reasoning is None
    assert choose_dialect(tokenizer, "none").tool_parsers == ("none",)
    with pytest.raises(ValueError, match=r"tool_call_parser must be one of auto, .*hermes.*, got 'x'"):
        choose_dialect(tokenizer, "x")
    with pytest.raises(ValueError, match=r"reasoning_parser must be one of auto, none, .*, got 'x'"):
        choose_dialect(tokenizer, "auto", "x")


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("", "may_open"),
        ("<|im_start|>assistant\n", "may_open"),
        ("<|im_start|>assistant\n<think>\n", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        ("</think>", "closed"),
    ],
)
def test_the_ending_of_a_prompt_says_whether_reasoning_is_open(ending: str, state: str) -> None:
    assert reasoning_state(Hermes(), ending) == state


def test_names_that_a_form_of_calls_cannot_hold() -> None:
    forms = {name: cls for name, cls in dialects().items() if cls is not Plain}
    lost = {
        "get_weather": [],
        "a.b-c": [],
        "ü1": [],
        "a b": ["gpt_oss", "mistral_args", "glm", "glm47", "pythonic"],
    }
    for name, expected in lost.items():
        assert {form for form, cls in forms.items() if not carries_name(cls, name)} == set(expected)
