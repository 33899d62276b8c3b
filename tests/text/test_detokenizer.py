"""The pieces of a stream: nothing twice, nothing lost, nothing taken back."""

import re
from functools import cache

import pytest

from diptych.reference.detokenizer import IncrementalDetokenizer
from diptych.shared.scheduling.stop_conditions import check_finished
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.types import FinishLength, FinishRegex, FinishString, FinishToken, Req, SamplingParams
from tests.properties import given, settings, st
from tests.text.make import EOS, START, TEXTS, byte_fallback, byte_level


def stream(
    tokenizer: Tokenizer,
    steps: list[list[int]],
    params: SamplingParams | None = None,
    prompt: list[int] | None = None,
) -> tuple[list[str], Req]:
    """Steps of ids through the finish check and the detokenizer, as in the engine."""
    params = params or SamplingParams(max_new_tokens=sum(map(len, steps)))
    req = Req("r", prompt or [], params, seed=0, eos_token_ids=tokenizer.eos_token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, params, req.origin_input_ids)
    pieces = []
    for ids in steps:
        req.output_ids += ids
        check_finished(req, len(ids), tokenizer.decode, tokenizer.vocab_size)
        pieces.append(detokenizer.append(ids, req.finished_reason, req.finished_len))
        if req.finished:
            break
    return pieces, req


def byte_tokens(text: str) -> list[int]:
    """One token for each byte, whatever the merges."""
    return [_byte_ids()[byte] for byte in text.encode()]


@cache
def _byte_ids() -> dict[int, int]:
    # The byte-level alphabet: visible bytes stand for themselves, the others are moved up from 256.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in visible]
    names = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(moved)}
    return {byte: byte_level().token_to_id(name) for byte, name in names.items()}


def cut(items: list, sizes: list[int]) -> list[list]:
    """`items` in pieces whose sizes repeat."""
    pieces, start = [], 0
    while start < len(items):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(items[start : start + size])
        start += size
    return pieces


# ---- stream == whole ----


@settings(max_examples=150)
@given(st.text(max_size=40), st.booleans(), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_stream_is_the_text(text: str, in_bytes: bool, sizes: list[int]) -> None:
    tokenizer = byte_level()
    ids = byte_tokens(text) if in_bytes else tokenizer.encode(text)
    pieces, _ = stream(tokenizer, cut(ids, sizes))
    assert "".join(pieces) == tokenizer.decode(ids) == text


@settings(max_examples=150)
@given(st.lists(st.integers(0, byte_level().vocab_size - 1), max_size=60), st.integers(1, 4), st.booleans())
def test_any_ids_give_the_same_text_in_pieces(ids: list[int], size: int, skip: bool) -> None:
    """Also ids whose bytes are no text at all."""
    tokenizer = byte_level()
    params = SamplingParams(max_new_tokens=len(ids), ignore_eos=True, skip_special_tokens=skip)
    pieces, _ = stream(tokenizer, cut(ids, [size]), params)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["▁", "▁Once", "▁a", "s", "é", ".", "你", "🙂", "\n"]), max_size=20))
def test_a_tokenizer_with_byte_fallback(words: list[str]) -> None:
    tokenizer = byte_fallback()
    ids = []
    for word in words:
        known = tokenizer.token_to_id(word)
        ids += [known] if known is not None else list(word.encode())
    prompt = [tokenizer.token_to_id(word) for word in ("▁upon", "▁a", "▁time")]
    pieces, _ = stream(tokenizer, [[i] for i in ids], prompt=prompt)
    assert "".join(pieces) == "".join(words).replace("▁", " ")


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(text: str) -> None:
    pieces, _ = stream(byte_level(), [[i] for i in byte_tokens(text)])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("num_emoji", [1, 4, 30])
def test_byte_fallback_with_several_tokens_a_step(size: int, num_emoji: int) -> None:
    """Speculation ends steps inside characters: their bytes must not spoil the whole ones before."""
    tokenizer = byte_fallback()
    text = "🙂🙃" * num_emoji
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, _ = stream(tokenizer, cut(ids, [size] * len(ids)))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)
    assert max(map(len, pieces)) <= size  # nothing is held longer than its own character


def test_a_text_that_ends_inside_a_character_says_so() -> None:
    pieces, _ = stream(byte_level(), [[i] for i in byte_tokens("a🙂")[:-1]])
    assert pieces == ["a", "", "", "\ufffd"]


def test_a_replacement_character_of_the_text_itself_stays() -> None:
    pieces, _ = stream(byte_level(), [[i] for i in byte_tokens("a\ufffdb\ufffd")])
    assert "".join(pieces) == "a\ufffdb\ufffd"


def test_characters_come_as_soon_as_they_are_whole() -> None:
    pieces, _ = stream(byte_level(), [[i] for i in byte_tokens("é你")])
    assert pieces == ["", "é", "", "", "你"]


def test_a_character_that_the_prompt_began_is_not_repeated() -> None:
    """The prompt's last tokens are only context: none of their text comes out."""
    tokenizer = byte_level()
    for num_bytes in range(1, 12):
        prompt = byte_tokens("你你你你")[-num_bytes:]
        pieces, _ = stream(tokenizer, [[i] for i in byte_tokens("好 x")], prompt=prompt)
        assert "".join(pieces) == "好 x"


def test_a_prompt_tail_that_begins_inside_a_character() -> None:
    """With byte fallback a run of bytes that is no text is given up as a whole."""
    for num_chars in range(2, 6):
        pieces, _ = stream(
            byte_fallback(), [[i] for i in "好".encode()], prompt=list(("你" * num_chars).encode())
        )
        assert "".join(pieces) == "好"


def test_a_character_amid_bytes_that_are_none() -> None:
    """More pending tokens than a character can have, and a whole character where they are parted."""
    invalid = _byte_ids()[0xFF]
    for num_before in range(10, 18):
        ids = [invalid] * num_before + byte_tokens("🙂") + [invalid]
        steps = [[i] for i in ids[:num_before]] + [ids[num_before:], byte_tokens("z")]
        params = SamplingParams(max_new_tokens=len(ids) + 1)
        pieces, _ = stream(byte_level(), steps, params)
        assert "".join(pieces) == "\ufffd" * num_before + "🙂\ufffdz"


def test_the_space_of_the_first_word_is_kept() -> None:
    tokenizer = byte_fallback()
    prompt = [tokenizer.token_to_id(word) for word in ("▁Once", "▁upon")]
    pieces, _ = stream(
        tokenizer, [[tokenizer.token_to_id("▁a")], [tokenizer.token_to_id("▁time")]], prompt=prompt
    )
    assert pieces == [" a", " time"]


# ---- cost ----


class Counting:
    """A tokenizer that notes how many ids it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self.num_decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("text", ["x", "🙂", "invalid"])
def test_the_cost_of_a_token_is_bounded(text: str) -> None:
    """Also when the bytes never become a character, and nothing comes out for long."""
    ids = [_byte_ids()[0xFF]] if text == "invalid" else byte_tokens(text)
    counting = Counting(byte_level())
    detokenizer = IncrementalDetokenizer(counting, SamplingParams())  # type: ignore[arg-type]
    num_tokens = 600
    text = "".join(detokenizer.append([ids[n % len(ids)]]) for n in range(num_tokens))
    assert counting.num_decoded < 60 * num_tokens
    text += detokenizer.append([], FinishLength(num_tokens))
    assert text == byte_level().decode([ids[n % len(ids)] for n in range(num_tokens)])


# ---- stops ----


def words(*texts: str) -> list[list[int]]:
    return [byte_level().encode(text) for text in texts]


def test_a_stop_string_inside_one_token_is_cut_out() -> None:
    tokenizer = byte_level()
    token = tokenizer.token_to_id(" the stop sign")
    pieces, req = stream(tokenizer, [*words("see"), [token], *words("no")], SamplingParams(stop="stop"))
    assert req.finished_reason == FinishString("stop")
    assert pieces == ["see", " the "]


def test_of_two_occurrences_in_one_token_the_first_is_cut() -> None:
    token = byte_level().token_to_id(" the stop sign")
    pieces, _ = stream(byte_level(), [byte_tokens("see"), [token]], SamplingParams(stop="s"))
    assert pieces == [""]  # "see" has one already
    pieces, _ = stream(byte_level(), [byte_tokens("to"), [token]], SamplingParams(stop="t"))
    assert pieces == [""]
    pieces, _ = stream(byte_level(), [byte_tokens("on"), [token]], SamplingParams(stop="s"))
    assert pieces == ["on", " the "]


def test_a_stop_string_over_several_tokens_is_held_back() -> None:
    steps = [[i] for i in byte_tokens("ab stop c")]
    pieces, req = stream(byte_level(), steps, SamplingParams(stop=" stop"))
    assert req.finished_reason == FinishString(" stop")
    assert pieces == ["a", "b", "", "", "", "", ""]


def test_a_near_match_is_given_out_once_it_is_none() -> None:
    steps = [[i] for i in byte_tokens("a stox")]
    pieces, _ = stream(byte_level(), steps, SamplingParams(stop=("stop", "oxy"), max_new_tokens=6))
    assert pieces == ["a", " ", "", "", "", "stox"]


def test_a_near_match_at_the_end_is_not_lost() -> None:
    steps = [[i] for i in byte_tokens("a sto")]
    pieces, req = stream(byte_level(), steps, SamplingParams(stop="stop", max_new_tokens=5))
    assert req.finished_reason == FinishLength(5)
    assert "".join(pieces) == "a sto"


def test_a_match_that_begins_inside_a_near_match() -> None:
    steps = [[i] for i in byte_tokens("aababac")]
    pieces, _ = stream(byte_level(), steps, SamplingParams(stop="abac"))
    assert "".join(pieces) == "aab"


def test_no_stop_trim_keeps_the_stop_and_holds_nothing_back() -> None:
    steps = [[i] for i in byte_tokens("ab stop c")]
    pieces, _ = stream(byte_level(), steps, SamplingParams(stop=" stop", no_stop_trim=True))
    assert pieces == ["a", "b", " ", "s", "t", "o", "p"]


def test_text_after_the_stop_string_within_a_step_is_cut_off() -> None:
    pieces, req = stream(byte_level(), [byte_tokens("one stop two")], SamplingParams(stop="stop"))
    assert pieces == ["one "]
    assert req.finished_len == 8


def test_a_stop_token_is_not_text() -> None:
    tokenizer = byte_level()
    eos, letter = tokenizer.token_to_id(EOS), byte_tokens("z")[0]
    for params, expected in [
        (SamplingParams(), "ab"),
        (SamplingParams(skip_special_tokens=False), "ab"),
        (SamplingParams(no_stop_trim=True, skip_special_tokens=False), f"ab{EOS}"),
        (SamplingParams(no_stop_trim=True), "ab"),
    ]:
        pieces, req = stream(tokenizer, [byte_tokens("ab"), [eos, letter]], params)
        assert req.finished_reason == FinishToken(eos)
        assert "".join(pieces) == expected
    pieces, _ = stream(tokenizer, [byte_tokens("abz")], SamplingParams(stop_token_ids=(letter,)))
    assert pieces == ["ab"]
    pieces, _ = stream(
        tokenizer, [byte_tokens("abz")], SamplingParams(stop_token_ids=(letter,), no_stop_trim=True)
    )
    assert pieces == ["abz"]


def test_special_tokens_can_be_shown() -> None:
    steps = [byte_tokens("a"), [byte_level().token_to_id(START)], byte_tokens("b")]
    assert stream(byte_level(), steps)[0] == ["a", "", "b"]
    shown, _ = stream(byte_level(), steps, SamplingParams(max_new_tokens=3, skip_special_tokens=False))
    assert shown == ["a", START, "b"]


def test_a_regex_cuts_from_the_beginning_of_its_match() -> None:
    params = SamplingParams(stop_regex=r"\d+\.")
    pieces, req = stream(byte_level(), [[i] for i in byte_tokens("abc 123. def")], params)
    assert req.finished_reason == FinishRegex(r"\d+\.", "123.")
    assert "".join(pieces) == "abc "
    kept = SamplingParams(stop_regex=r"\d+\.", no_stop_trim=True)
    pieces, _ = stream(byte_level(), [[i] for i in byte_tokens("abc 123. def")], kept)
    assert pieces == list("abc 123.")


@settings(max_examples=200)
@given(
    st.text(alphabet="ab🙂 ", max_size=30),
    st.lists(st.text(alphabet="ab🙂 ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_the_stream_ends_before_the_first_stop_string(text: str, stop: list[str], sizes: list[int]) -> None:
    """Whatever the strings and the steps: the text is that of the shortest run of tokens that holds a stop
    string, up to the match that begins first."""
    ids = byte_tokens(text)
    params = SamplingParams(stop=tuple(stop), max_new_tokens=len(ids))
    pieces, req = stream(byte_level(), cut(ids, sizes), params)
    ends = [match.end() for string in stop if (match := re.search(re.escape(string), text))]
    expected = text[: min(ends, default=len(text))]
    starts = [expected.find(string) for string in stop if string in expected]
    assert "".join(pieces) == expected[: min(starts, default=len(expected))]
    assert isinstance(req.finished_reason, FinishString) == bool(ends) or not ids
