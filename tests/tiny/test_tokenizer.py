from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from diptych.shared.tools.training.learn_tokenizer import (
    CHAT_TEMPLATE,
    VOCAB_SIZE,
    save_tokenizer,
    train_tokenizer,
)

ASSETS = Path(__file__).parents[2] / "shared" / "assets"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ASSETS / "tiny-dense")


@pytest.mark.parametrize(
    "text",
    [
        "Hello! Who are you?",
        "42 and 1234567890",
        "🦜 emoji 👩‍👩‍👧 with joiners",
        "漢字 かな 한국어 Ελληνικά العربية",
        "  two  spaces\tand a tab\r\nnext\n\n\nlines ",
        '{"name": "Mia", "age": 12, "tags": [true, null]}',
        "e\u0301 and é, zero\u200bwidth, \x00 control \x1f",
        "",
    ],
)
def test_text_comes_back_exactly(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    everything = "".join(map(chr, range(0x250))) + "".join(map(chr, range(0x10000, 0x10040)))
    assert tokenizer.decode(tokenizer.encode(everything)) == everything


def test_digits_are_split_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a 123 45")] == list("a 123 45")


def test_no_token_spans_a_digit(tokenizer: PreTrainedTokenizerBase) -> None:
    with_digits = [token for token in tokenizer.get_vocab() if any(char in "0123456789" for char in token)]
    assert sorted(with_digits) == list("0123456789")


def test_vocabulary_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    assert VOCAB_SIZE % 64 != 0
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<|im_end|>"), skip_special_tokens=True) == "a"
    assert len(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>")) == 3


def test_chat_template_is_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
    ]
    turns = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n"
    )
    render = tokenizer.apply_chat_template
    assert render(messages, tokenize=False) == turns
    assert render(messages, tokenize=False, add_generation_prompt=True) == turns + "<|im_start|>assistant\n"


def test_all_models_share_the_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for other in ("tiny-moe", "tiny-hybrid"):
            assert (ASSETS / "tiny-dense" / name).read_bytes() == (ASSETS / other / name).read_bytes()
    assert (ASSETS / "tiny-dense" / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_training_from_the_same_chats_gives_the_same_tokenizer(tmp_path: Path) -> None:
    for run in ("first", "second"):
        save_tokenizer(train_tokenizer(num_chats=1500), tmp_path / run)
    first, second = ((tmp_path / run / "tokenizer.json").read_text() for run in ("first", "second"))
    assert first == second
