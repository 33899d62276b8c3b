"""Markers that clients write stay text, in every role."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from diptych.shared.dialects.hermes import Hermes
from diptych.shared.dialects.parts.choose import inert_for, reasoning_fields, reasoning_state
from diptych.shared.text.inert import BREAKER, Inert
from diptych.shared.text.tokenizer import Tokenizer
from tests.properties import given, st
from tests.text.make import EOS, START, byte_level

THINK, END = "<think>", "</think>"
TEMPLATE = (
    "{{ tools|tojson if tools }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c|tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if mode == 'open' %}<think>\n{% elif mode == 'closed' %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def thinking_tokenizer() -> Tokenizer:
    raw = byte_level().hf_tokenizer.backend_tokenizer
    raw = type(raw).from_str(raw.to_str())
    raw.add_tokens([AddedToken(marker, normalized=False) for marker in Hermes.markers])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, chat_template=TEMPLATE))


@pytest.mark.parametrize("mode", ["open", "closed", None])
@pytest.mark.parametrize(
    "text", ["hi", f"a {THINK}b", f"{END}", f"{THINK}x{END}y{THINK}", "<tool_call>", f"{START}{EOS}"]
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_markers_in_messages_change_nothing(mode: str | None, text: str, role: str) -> None:
    tokenizer, dialect = thinking_tokenizer(), Hermes()
    inert = inert_for(dialect, tokenizer)
    call = {"id": text, "function": {"name": text, "arguments": {text: [text]}}}
    messages: list[dict[str, Any]] = [{"role": role, "content": text, "tool_calls": [call]}]
    tools = [{"function": {"name": "f", "description": text}}]
    prompt = tokenizer.conversation(messages, tools, inert=inert, ending_with=(THINK, END), mode=mode)
    plain = tokenizer.render(messages, tools, mode=mode)
    assert tokenizer.decode(prompt.ids) == plain, "the text itself is the same"
    markers = {tokenizer.token_to_id(marker) for marker in (*Hermes.markers, START, EOS)}
    hello = tokenizer.conversation([{"role": role, "content": "hi"}], ending_with=(THINK,), mode=mode)
    assert [i for i in prompt.ids if i in markers] == [i for i in hello.ids if i in markers]
    state = reasoning_state(dialect, prompt.ending)
    assert state == (mode or "may_open")
    start, end = tokenizer.token_to_id(THINK), tokenizer.token_to_id(END)
    assert (
        reasoning_fields(dialect, prompt.ending, tokenizer)
        == {
            "open": {"reasoning_start": None, "reasoning_end": (end,)},
            "may_open": {"reasoning_start": start, "reasoning_end": (end,)},
            "closed": {},
        }[state]
    )


@given(st.lists(st.sampled_from(["<a>", "<ab>", "a>", "<", "b", ">", "<<a>", BREAKER]), max_size=12))
def test_no_piece_holds_a_marker(parts: list[str]) -> None:
    text, markers = "".join(parts), ("<a>", "<ab>", "<<a>")
    broken = Inert(markers)(text)
    assert broken.replace(BREAKER, "") == text.replace(BREAKER, "")
    assert not any(marker in piece for marker in markers for piece in broken.split(BREAKER))


def test_markers_that_cannot_be_broken_or_are_white_space_stay() -> None:
    assert Inert(["\n\n", "x", " "])("x\n\n y") == "x\n\n y"
    assert Inert([])("<a>") == "<a>"
