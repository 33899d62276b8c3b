import copy
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from diptych.shared.text.tokenizer import Tokenizer
from tests.text.make import EOS, START, TEXTS, byte_level


@pytest.mark.parametrize("text", [*TEXTS, "", "\ufffd", "\x00"])
def test_text_comes_back(text: str) -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spaces_before_punctuation_are_not_cleaned_up() -> None:
    tokenizer = byte_level(clean_up=True)
    text = "I do n't know , he said ."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_shown_or_skipped() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(f"a{START}b{EOS}")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == f"a{START}b{EOS}"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_what_it_says_about_its_ids() -> None:
    tokenizer = byte_level()
    eos, start = tokenizer.token_to_id(EOS), tokenizer.token_to_id(START)
    assert tokenizer.eos_token_ids == {eos}
    assert tokenizer.special_ids == {eos, start}
    assert tokenizer.id_to_token(eos) == EOS
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.id_to_token(tokenizer.vocab_size - 1) is not None
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_a_class_that_decodes_in_its_own_way_does_so() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **options: object) -> str:
            return super()._decode(*args, **options).upper()

    plain = byte_level()
    ids = plain.encode("hello")
    assert plain.decode(ids) == "hello"
    assert Tokenizer(Loud(tokenizer_object=plain.hf_tokenizer.backend_tokenizer)).decode(ids) == "HELLO"


def test_chat() -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == f"{START}user\nhi{EOS}{START}assistant\n"
    assert tokenizer.decode(tokenizer.chat(messages, add_generation_prompt=False)) == f"{START}user\nhi{EOS}"
    thought = tokenizer.decode(tokenizer.chat(messages, enable_thinking=False))
    assert thought.endswith("assistant\nno thinking")


def test_chat_adds_no_special_token_of_the_tokenizer_to_those_of_the_template() -> None:
    raw = copy.deepcopy(byte_level().hf_tokenizer)
    start = (START, raw.convert_tokens_to_ids(START))
    raw.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[start]
    )
    tokenizer = Tokenizer(raw)
    assert tokenizer.decode(tokenizer.encode("hi")) == f"{START}hi"
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == f"{START}user\nhi{EOS}{START}assistant\n"


def test_a_long_conversation_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "a" * 100}]
    num_chars = len(tokenizer.decode(tokenizer.chat(messages)))
    assert tokenizer.chat(messages, max_chars=num_chars)
    monkeypatch.setattr(tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(ValueError, match=f"has {num_chars} characters; the context holds {num_chars - 1}"):
        tokenizer.chat(messages, max_chars=num_chars - 1)


def test_arguments_of_the_template() -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat(messages, documents=[{"text": "a"}], enable_thinking=True)
    for name in ("chat_template", "messages", "self", "tokenizer_kwargs", "padding", "kwargs"):
        with pytest.raises(ValueError, match=f"'{name}' is no switch of the chat template"):
            tokenizer.chat(messages, **{name: None})
    with pytest.raises(ValueError, match="'tools' is no switch"):
        tokenizer.check_template_args({"tools": []})


@pytest.mark.parametrize("messages", [[], [3], ["hi"], [{"role": "user"}, "hi"], 5, "hi", {"role": "user"}])
def test_messages_that_are_none_are_refused(messages: list) -> None:
    with pytest.raises(ValueError, match="non-empty list of mappings"):
        byte_level().chat(messages)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "hi"}, "message 1 has no role; it needs role and content"),
        ({"role": 3, "content": "hi"}, "message 1 has no role; it needs role and content"),
        ({"role": "user", "content": 3}, "content of message 1 must be a text or a list of parts, got int"),
        (
            {"role": "user", "content": {"text": "hi"}},
            "content of message 1 must be a text or a list of parts, got dict",
        ),
    ],
)
def test_a_malformed_message_is_named(message: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        byte_level().chat([{"role": "user", "content": "hi"}, message])


def test_a_message_may_have_no_content() -> None:
    assert byte_level().chat([{"role": "assistant", "content": None, "tool_calls": []}])


def test_a_template_that_refuses_says_why() -> None:
    tokenizer = Tokenizer(
        byte_level().hf_tokenizer.__class__(tokenizer_object=byte_level().hf_tokenizer.backend_tokenizer)
    )
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
    tokenizer.hf_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
    tokenizer.hf_tokenizer.chat_template = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    with pytest.raises(ValueError, match="nested too deeply"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.eos_token_ids == frozenset()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer: none of tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_saved_tokenizer_loads(tmp_path: Path) -> None:
    byte_level().hf_tokenizer.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(TEXTS[1]) == byte_level().encode(TEXTS[1])
    assert tokenizer.special_ids == byte_level().special_ids
    assert tokenizer.chat([{"role": "user", "content": "hi"}])
