"""The bytes of tokens add up to the text's, for both families of vocabularies."""

from __future__ import annotations

import pytest

from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.text.token_bytes import TokenBytes
from diptych.shared.text.tokenizer import Tokenizer

TEXTS = ["What is 12 + 30?", "naïve café – 日本語 🙂👩‍👩‍👧", "a\tb\n  c", "e\u0301"]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_add_up(text: str) -> None:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("tiny-dense"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    token_bytes = TokenBytes(tokenizer)
    assert b"".join(map(token_bytes.of, ids)).decode() == tokenizer.decode(ids)


def test_special_tokens_and_ids_without_a_token() -> None:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("tiny-dense"))
    token_bytes = TokenBytes(tokenizer)
    for token_id in tokenizer.eos_token_ids:
        assert token_bytes.of(token_id).decode() == tokenizer.id_to_token(token_id)
    assert token_bytes.of(tokenizer.vocab_size + 5) == b""
