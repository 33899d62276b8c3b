"""Bad words become the token ids that the tokenizer writes for them, and never occur in an answer."""

from __future__ import annotations

import pytest

from diptych import LLM
from diptych.shared.text.bad_words import with_bad_word_ids
from diptych.shared.types import SamplingParams


class Spelling:
    """One token for a letter; " a" is a token of its own."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [200, *text[2:].encode()] if text.startswith(" a") else list(text.encode())


def test_a_word_is_banned_at_the_begin_and_behind_a_space() -> None:
    params = with_bad_word_ids(SamplingParams(bad_words=(" ab", "xy"), bad_word_ids=((1, 2),)), Spelling())
    # " xy" ends with the ids of "xy", so it needs none of its own.
    assert params.bad_word_ids == ((1, 2), (97, 98), (200, 98), (120, 121))
    assert with_bad_word_ids(params, Spelling()).bad_word_ids == params.bad_word_ids


def test_without_a_tokenizer_bad_words_are_refused() -> None:
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        with_bad_word_ids(SamplingParams(bad_words=("a",)), None)


@pytest.mark.parametrize("panel", ["reference", pytest.param("optimized", marks=pytest.mark.full)])
def test_the_answer_avoids_them(panel: str) -> None:
    llm = LLM("tiny-dense", device="cpu", panel=panel)
    prompt = llm.chat_prompt([{"role": "user", "content": "What is 12 + 30?"}])
    plain = llm.generate(prompt, temperature=0, max_tokens=16, progress=False)
    assert "42" in plain.text
    for words in (["42"], ["= 4"], ["12 + 30"]):
        answer = llm.generate(prompt, temperature=0, max_tokens=16, bad_words=words, progress=False)
        assert words[0] not in answer.text
        assert answer.text != plain.text
