"""Token ids that are kept by segment: what they are without, and nothing where a text cannot be cut."""

from __future__ import annotations

import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from diptych.shared.text.segments import MAX_CUTS, Segments, cut_tokens, num_bytes
from diptych.shared.text.tokenizer import Tokenizer
from tests.text.make import EOS, START, TEXTS, byte_fallback, byte_level

PIECES = [*TEXTS, EOS, START, "<|sta", "rt|>", " the stop sign", " the stop", "\n", " ", "  ", "a", "é"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_ids_are_those_of_the_whole_text(make: Any) -> None:
    tokenizer: Tokenizer = make()
    added = cut_tokens(tokenizer.hf_tokenizer)
    assert added is not None
    assert {EOS, START} <= set(added)
    segments = Segments(lambda text: tokenizer.encode(text, False), added, max_bytes=5000)
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        assert segments.ids(text) == tokenizer.encode(text, False), text


def test_a_conversation_encodes_its_new_messages_only() -> None:
    tokenizer = Tokenizer(byte_level().hf_tokenizer)
    encoded: list[str] = []
    encode = tokenizer.encode
    tokenizer.encode = lambda text, special=True: (encoded.append(text), encode(text, special))[1]  # type: ignore[method-assign]
    messages = [{"role": "user", "content": TEXTS[0]}]
    first = tokenizer.chat(messages)
    messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": TEXTS[1]}]
    encoded.clear()
    second = tokenizer.chat(messages)
    assert encoded == ["assistant\nhi", f"user\n{TEXTS[1]}"]
    assert second == byte_level().chat(messages)
    assert first == byte_level().chat(messages[:1])


def test_the_longest_of_two_tokens_that_begin_alike() -> None:
    segments = Segments(lambda text: [ord(c) for c in text], {"<a>": 1, "<a>b": 2})
    assert segments.ids("x<a>b<a>c") == [ord("x"), 2, 1, ord("c")]


def test_the_oldest_are_forgotten() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [len(text)]

    segments = Segments(encode, {"|": 0}, max_bytes=2 * num_bytes("a", array("i", [1])))
    segments.ids("a|b|a|c")  # c takes the place of b
    assert encoded == ["a", "b", "c"]
    assert segments.ids("a|b") == [1, 0, 1]
    assert encoded == ["a", "b", "c", "b"]
    assert Segments(encode, {}, max_bytes=0).ids("longer than all") == [15]


def test_threads_share_it() -> None:
    tokenizer = byte_level()
    segments = Segments(lambda text: tokenizer.encode(text, False), {EOS: tokenizer.encode(EOS)[0]}, 3000)
    texts = [EOS.join(random.Random(i).choices(TEXTS, k=5)) for i in range(50)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(segments.ids, texts)) == [tokenizer.encode(text, False) for text in texts]


def _raw() -> RawTokenizer:
    return RawTokenizer.from_str(byte_level().hf_tokenizer.backend_tokenizer.to_str())


def _with_normalizer(raw: RawTokenizer) -> None:
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _with_first_space(raw: RawTokenizer) -> None:
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")


def _with_prefix_space(raw: RawTokenizer) -> None:
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])


def _with_stripping_token(raw: RawTokenizer) -> None:
    raw.add_special_tokens([AddedToken("<|strip|>", lstrip=True, normalized=False)])


def _with_many_tokens(raw: RawTokenizer) -> None:
    raw.add_special_tokens([f"<|{i}|>" for i in range(MAX_CUTS)])


@pytest.mark.parametrize(
    "change",
    [_with_normalizer, _with_first_space, _with_prefix_space, _with_stripping_token, _with_many_tokens],
)
def test_where_a_segment_depends_on_the_text_before_it_nothing_is_cut(change: Any) -> None:
    raw = _raw()
    change(raw)
    assert cut_tokens(PreTrainedTokenizerFast(tokenizer_object=raw)) is None
    assert cut_tokens(object()) is None
    assert cut_tokens(PreTrainedTokenizerFast(tokenizer_object=_raw(), split_special_tokens=True)) is None


@pytest.mark.parametrize("longer", [f"{START}user", f"the{START}", f" the{EOS[:3]}", f"x{EOS}{START}"])
def test_a_longer_token_over_a_special_one_wins(longer: str) -> None:
    """One that is not special is cut only where it may take the place of a special one."""
    raw = _raw()
    assert set(cut_tokens(PreTrainedTokenizerFast(tokenizer_object=raw)) or ()) == {EOS, START}
    raw.add_tokens([AddedToken(longer, normalized=False)])
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    added = cut_tokens(hf_tokenizer)
    assert added is not None
    assert set(added) == {EOS, START, longer, " the stop sign"}
    segments = Segments(lambda text: hf_tokenizer.encode(text, add_special_tokens=False), added)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices([longer, EOS, START, EOS[3:], "user", "the", " ", "x"], k=8))
        assert segments.ids(text) == hf_tokenizer.encode(text, add_special_tokens=False), text


def test_the_bound_counts_ids() -> None:
    """Characters of four ids each take four times the memory of their ids."""
    segments = Segments(lambda text: [1] * (4 * len(text)), {"|": 0}, max_bytes=100_000)
    for i in range(20):
        segments.ids(f"{i}" + "🙂" * 1000)
    held = sum(num_bytes(text, ids) for text, ids in segments._kept.items())
    assert 75_000 < held <= 100_000
    assert held + segments._bytes_left == 100_000
