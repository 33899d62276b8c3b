"""Special tokens in decoded text: each control token is one character, whatever stands around it."""

from __future__ import annotations

import pytest

from diptych.reference.detokenizer import IncrementalDetokenizer
from diptych.shared.dialects.gpt_oss import GptOss
from diptych.shared.dialects.parts.answer_parser import AnswerParser, Piece
from diptych.shared.text.control_text import ControlText, control_chars
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.types import FinishLength, SamplingParams
from tests.properties import given, st
from tests.text.make import EOS, START, byte_fallback, byte_level


def harmony_tokenizer() -> Tokenizer:
    raw = byte_level().hf_tokenizer.backend_tokenizer
    raw = type(raw).from_str(raw.to_str())
    raw.add_special_tokens(list(GptOss.markers))
    return Tokenizer(type(byte_level().hf_tokenizer)(tokenizer_object=raw, eos_token=EOS))


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
def test_control_tokens_are_characters(tokenizer: Tokenizer) -> None:
    chars = control_chars([START, EOS, "no token", START], tokenizer)
    assert chars == {START: "\ufdd0", EOS: "\ufdd1"}
    text = ControlText(tokenizer, chars)
    start, end = (tokenizer.token_to_id(token) for token in (START, EOS))
    ids = tokenizer.encode("a", add_special_tokens=False)
    assert text.decode([start, *ids, end, end]) == f"\ufdd0{tokenizer.decode(ids)}\ufdd1\ufdd1"
    assert text.special_ids == tokenizer.special_ids - {start, end}
    assert control_chars([START], None) == {}


def test_characters_that_a_model_writes_are_no_control() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a\ufdd0b", add_special_tokens=False)
    assert ControlText(tokenizer, control_chars([START], tokenizer)).decode(ids) == "a\ufffdb"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_harmony_from_tokens_in_steps(sizes: list[int]) -> None:
    """Tokens through the detokenizer and the parser: spelled markers are text, tokens are not."""
    tokenizer = harmony_tokenizer()
    chars = control_chars(GptOss.markers, tokenizer)
    text = (
        "<|channel|>analysis<|message|>The user says hi 🙂.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "ü"}<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Write <"
    )
    ids = tokenizer.encode(text, False) + tokenizer.encode("|call|>.", False)
    detokenizer = IncrementalDetokenizer(ControlText(tokenizer, chars), SamplingParams(), [])
    parser = AnswerParser(GptOss(), {"f": True}, "may_open", controls=chars)
    events, at = [], 0
    while at < len(ids):
        size = sizes[at % len(sizes)]
        finish = FinishLength(len(ids)) if at + size >= len(ids) else None
        events += parser.feed(detokenizer.append(ids[at : at + size], finish))
        at += size
    events += parser.finish()
    texts = {"content": "", "reasoning": "", "arguments": ""}
    for event in events:
        if isinstance(event, Piece):
            texts[event.kind] += event.text
        else:
            texts["arguments"] += event.arguments
    assert texts == {
        "content": "Write <|call|>.",
        "reasoning": "The user says hi 🙂.",
        "arguments": '{"a": "ü"}',
    }
