"""When a request is done, and how many of its ids count."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import regex

from diptych.shared.scheduling.stop_conditions import check_finished
from diptych.shared.text import stop_text
from diptych.shared.text.stop_text import REGEX_SECONDS
from diptych.shared.types import (
    FinishAbort,
    FinishError,
    FinishLength,
    FinishReason,
    FinishRegex,
    FinishString,
    FinishToken,
    Req,
    SamplingParams,
)
from tests.properties import given, settings, st

VOCAB_SIZE = 1000
EOS = 900
# Token texts: an id below 256 is a byte of UTF-8, the others are whole words.
WORDS = {300: "stop", 301: "sto", 302: "p it", 303: " the end", 304: "x" * 40, 305: "", 900: "<eos>"}


def decode(ids: list[int]) -> str:
    data = b"".join(bytes([i]) if i < 256 else WORDS[i].encode() for i in ids)
    return data.decode("utf-8", errors="replace")


def never(ids: list[int]) -> str:
    raise AssertionError("text was asked for without need")


def make_req(max_new_tokens: int = 100, prompt: tuple[int, ...] = (1,), **params) -> Req:
    return Req(
        rid="r",
        origin_input_ids=list(prompt),
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens, **params),
        seed=0,
        eos_token_ids=frozenset({EOS}),
    )


def feed(req: Req, *steps: list[int], decode_text: Callable[[list[int]], str] = decode) -> Req:
    """Append and check, step by step, until the request is finished."""
    for ids in steps:
        req.output_ids += ids
        check_finished(req, len(ids), decode_text, VOCAB_SIZE)
        if req.finished:
            break
    return req


def one_by_one(text: str) -> list[list[int]]:
    return [[byte] for byte in text.encode()]


def assert_ends(req: Req, reason: FinishReason | None, finished_len: int | None) -> None:
    assert (req.finished_reason, req.finished_len) == (reason, finished_len)


# ---- each reason alone ----


def test_nothing_happens_in_the_middle() -> None:
    assert_ends(feed(make_req(), [1], [2, 3], decode_text=never), None, None)


@pytest.mark.parametrize("steps", [[[1], [2], [3]], [[1, 2, 3]], [[1, 2], [3, 4]], [[1, 2, 3, 4, 5]]])
def test_length(steps: list) -> None:
    assert_ends(feed(make_req(max_new_tokens=3), *steps, decode_text=never), FinishLength(3), 3)


def test_the_clamped_length_counts_not_the_wish() -> None:
    req = make_req(max_new_tokens=50)
    req.max_new_tokens = 2
    assert_ends(feed(req, [1], [2], decode_text=never), FinishLength(2), 2)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("token_id", [EOS, 7])
def test_a_stop_token_at_any_offset(at: int, token_id: int) -> None:
    new = [1, 2, 3]
    new[at] = token_id
    req = feed(make_req(stop_token_ids=(7,)), [4, 5], new, decode_text=never)
    assert_ends(req, FinishToken(token_id), 2 + at + 1)


def test_ignore_eos_disables_stop_tokens_but_not_stop_strings() -> None:
    req = make_req(stop_token_ids=(7,), ignore_eos=True)
    assert_ends(feed(req, [EOS, 7, 1], decode_text=never), None, None)
    req = make_req(stop="stop", ignore_eos=True)
    assert_ends(feed(req, [EOS], [300]), FinishString("stop"), 2)


@pytest.mark.parametrize("bad_id", [-1, VOCAB_SIZE, VOCAB_SIZE + 5])
@pytest.mark.parametrize("at", [0, 2])
def test_an_id_that_is_no_token_is_an_error_and_does_not_count(bad_id: int, at: int) -> None:
    new = [1, 2, 3]
    new[at] = bad_id
    req = feed(make_req(stop="zzz"), [4], new)
    assert isinstance(req.finished_reason, FinishError)
    assert req.finished_len == 1 + at


@pytest.mark.parametrize(("bias", "status", "message"), [(-math.inf, 400, "is banned"), (0.0, 500, "NaN")])
def test_the_error_of_a_request_that_bans_every_token_is_its_own(
    bias: float, status: int, message: str
) -> None:
    reason = feed(make_req(logit_bias=dict.fromkeys(range(VOCAB_SIZE), bias)), [-1]).finished_reason
    assert isinstance(reason, FinishError)
    assert reason.status == status
    assert message in reason.message


def test_a_request_of_no_new_tokens_ends_without_output() -> None:
    assert_ends(
        feed(make_req(max_new_tokens=0, return_logprob=True), [5], decode_text=never), FinishLength(0), 0
    )


def test_an_error_ends_a_request_of_no_new_tokens() -> None:
    req = make_req(max_new_tokens=0)
    req.to_finish = FinishError("NaN")
    assert_ends(feed(req, [5], decode_text=never), FinishError("NaN"), 0)


def test_the_last_id_of_the_vocabulary_is_a_token() -> None:
    assert_ends(feed(make_req(), [VOCAB_SIZE - 1], decode_text=never), None, None)


def test_an_abort_drops_the_tokens_in_flight() -> None:
    req = feed(make_req(), [1, 2])
    req.to_finish = FinishAbort("gone")
    assert_ends(feed(req, [3, EOS], decode_text=never), FinishAbort("gone"), 2)


def test_a_finished_request_keeps_its_first_reason() -> None:
    req = feed(make_req(max_new_tokens=1), [1])
    req.output_ids.append(EOS)
    check_finished(req, 1, never, VOCAB_SIZE)
    assert_ends(req, FinishLength(1), 1)


def test_stop_regexes_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 0.02, 0.06])
    req = make_req(stop_regex=("x", "y", "z"))
    monkeypatch.setattr(stop_text, "time", SimpleNamespace(monotonic=lambda: next(times)))
    given: list[float] = []

    class Compiled:
        flags = 0

        def search(self, *args: object, timeout: float, **more: object) -> None:
            given.append(timeout)

    monkeypatch.setattr(stop_text.regex, "compile", lambda pattern: Compiled())
    feed(req, [1])
    assert given == [pytest.approx(REGEX_SECONDS), pytest.approx(REGEX_SECONDS - 0.02), 0.001]


# ---- stop strings ----


def test_a_stop_string_within_one_token() -> None:
    req = feed(make_req(stop="end"), *one_by_one("this is "), [303], [1])
    assert_ends(req, FinishString("end"), 9)


def test_a_stop_string_split_over_tokens() -> None:
    assert_ends(feed(make_req(stop="stop"), [301], [302], [1]), FinishString("stop"), 2)
    req = feed(make_req(stop="a stop"), *one_by_one("not sto, a stop, not"))
    assert_ends(req, FinishString("a stop"), len("not sto, a stop"))


def test_a_near_match_does_not_stop() -> None:
    assert_ends(feed(make_req(stop="stops"), [301], [302], [300]), None, None)


@pytest.mark.parametrize("at", range(5))
def test_the_first_token_count_that_contains_the_string(at: int) -> None:
    """Several tokens are accepted together, and those after the match do not count."""
    new = [10, 11, 12, 13, 14]
    new[at] = 300
    assert_ends(feed(make_req(stop="stop"), [1, 2], new), FinishString("stop"), 2 + at + 1)


def test_of_several_strings_the_one_that_begins_first() -> None:
    req = feed(make_req(stop=("p i", "stop", "op")), [301, 302])
    assert_ends(req, FinishString("stop"), 2)
    assert_ends(feed(make_req(stop=("ab", "abc")), *one_by_one("xab"), [1]), FinishString("ab"), 3)


def test_the_prompt_does_not_count() -> None:
    req = make_req(stop="stop", prompt=(301,))
    assert_ends(feed(req, [ord("p")], [ord("q")]), None, None)


def test_the_space_that_a_tokenizer_drops_at_the_start_of_a_text_counts() -> None:
    req = make_req(stop=" the", prompt=(1, 2, 3))
    assert_ends(
        feed(req, [303], decode_text=lambda ids: decode(ids).removeprefix(" ")), FinishString(" the"), 1
    )


@pytest.mark.parametrize("num_before", [0, 1, 5, 13, 14, 15, 16, 17, 40, 200])
@pytest.mark.parametrize("filler", ["x", "é", "你", "🙂"])
def test_a_stop_string_after_any_length_of_text(num_before: int, filler: str) -> None:
    """The window over the tail may begin anywhere, also inside a character."""
    before = filler * num_before
    req = feed(make_req(stop=filler + "end", max_new_tokens=2000), *one_by_one(before + filler + "end!"))
    assert_ends(req, FinishString(filler + "end"), len((before + filler + "end").encode()))


def test_tokens_without_text_do_not_hide_a_match() -> None:
    steps = [[301], *[[305]] * 60, [302]]
    assert_ends(
        feed(make_req(stop="stop", max_new_tokens=200), *[[1]] * 50, *steps), FinishString("stop"), 50 + 62
    )


def test_a_tokenizer_that_gives_up_a_run_of_bytes_as_a_whole() -> None:
    """So do those with byte fallback: a window that began inside a character would show none of the run."""

    def decode_run(ids: list[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    for num_before in range(12, 20):
        steps = one_by_one("你" * num_before + "好")
        req = feed(make_req(stop="好"), *steps, decode_text=decode_run)
        assert_ends(req, FinishString("好"), len(steps))


def test_a_character_completed_by_the_last_byte() -> None:
    assert_ends(feed(make_req(stop="🙂"), *one_by_one("a🙂b")), FinishString("🙂"), 5)


def test_the_cost_of_a_step_does_not_grow_with_the_output() -> None:
    longest = 0

    def measured(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    feed(make_req(stop="0123456789", max_new_tokens=5000), *one_by_one("x" * 3000), decode_text=measured)
    assert 10 < longest < 60
    longest = 0
    feed(make_req(stop="0123456789", max_new_tokens=5000), *one_by_one("你" * 1000), decode_text=measured)
    assert 10 < longest < 100  # three tokens a character


def test_min_new_tokens_does_not_delay_stop_strings() -> None:
    assert_ends(feed(make_req(stop="stop", min_new_tokens=10), [300]), FinishString("stop"), 1)


# ---- regexes ----


def test_a_regex_sees_the_whole_output() -> None:
    req = make_req(stop_regex=r"^A.*Z", max_new_tokens=400)
    feed(req, *one_by_one("A" + "m" * 300 + "Z."))
    assert_ends(req, FinishRegex(r"^A.*Z", "A" + "m" * 300 + "Z"), 302)


def test_the_first_token_count_at_which_a_regex_matches() -> None:
    digits = [ord(c) for c in "a123b"]
    assert_ends(feed(make_req(stop_regex=r"\d{2}"), digits), FinishRegex(r"\d{2}", "12"), 3)


def test_of_several_regexes_the_match_that_begins_first() -> None:
    req = feed(make_req(stop_regex=("op", "s.o")), [300])
    assert_ends(req, FinishRegex("s.o", "sto"), 1)


# ---- several reasons ----


def test_the_earliest_token_wins_whatever_its_reason() -> None:
    assert_ends(feed(make_req(max_new_tokens=2), [1, 2, EOS]), FinishLength(2), 2)
    assert_ends(feed(make_req(max_new_tokens=3), [1, EOS, 3]), FinishToken(EOS), 2)
    assert_ends(feed(make_req(stop="stop"), [300, EOS]), FinishString("stop"), 1)
    assert_ends(feed(make_req(stop="stop"), [EOS, 300]), FinishToken(EOS), 1)
    assert_ends(feed(make_req(stop_regex="t.p", stop="zz"), [300, -1]), FinishRegex("t.p", "top"), 1)
    assert isinstance(feed(make_req(stop="stop"), [-1, 300]).finished_reason, FinishError)


def test_at_one_token_a_stop_wins_over_the_length_and_over_lesser_stops() -> None:
    assert_ends(feed(make_req(max_new_tokens=1), [EOS]), FinishToken(EOS), 1)
    assert_ends(feed(make_req(max_new_tokens=1, stop="stop"), [300]), FinishString("stop"), 1)
    assert_ends(feed(make_req(max_new_tokens=1, stop_regex="st"), [300]), FinishRegex("st", "st"), 1)
    assert_ends(feed(make_req(stop="eos"), [EOS]), FinishToken(EOS), 1)
    assert_ends(feed(make_req(stop="op", stop_regex="st"), [300]), FinishString("op"), 1)
    assert isinstance(feed(make_req(max_new_tokens=1), [-1]).finished_reason, FinishError)


# ---- the scan of a growing output ----

ATOMS = st.sampled_from(
    [
        *"abé ",
        ".",
        r"\b",
        "^",
        "$",
        r"\Z",
        "[ab]",
        "(?=b)",
        "(?!b)",
        "(?<=a)",
        "(?<!a)",
        "(?<=a.*)",
        r"\G",
        "\n",
    ]
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=2).map(lambda two: f"(?:{two[0]}|{two[1]})")
        | inner.map(lambda one: f"(?:{one})+")
        | inner.map(lambda one: f"(?:{one})*?")
        | inner.map(lambda one: f"(?>{one})")
        | inner.map(lambda one: f"(?rm:{one})" if len(one) == 1 else f"(?:{one}){{1,2}}")
    ),
    max_leaves=6,
)


@given(PATTERNS, st.text("abé \n", max_size=12))
@settings(max_examples=600)
def test_a_scan_finds_what_a_search_of_the_whole_text_finds(pattern: str, text: str) -> None:
    """At each token, a byte of the text. A text that ends inside a character ends with U+FFFD."""
    compiled = regex.compile(pattern)
    if compiled.search("") is not None:  # such a pattern is refused
        return
    scan, data = stop_text.OutputScan([1], decode), text.encode()
    for count in range(1, len(data) + 1):
        scan.append(data[count - 1])
        match = compiled.search(decode([*data[:count]]))
        found = scan.search([pattern], 10.0)
        assert found == (None if match is None else (pattern, match.group())), (pattern, data[:count])
        if found:
            break


def test_the_cost_of_a_token_does_not_depend_on_the_output() -> None:
    num_decoded, num_searched = [], []

    def counting(ids: list[int]) -> str:
        num_decoded.append(len(ids))
        return decode(ids)

    class Counted(stop_text.OutputScan):
        def search(self, patterns, seconds):  # type: ignore[no-untyped-def]
            num_searched.append(len(self._text) - self._starts.get("the end", 0))
            return super().search(patterns, seconds)

    req = make_req(max_new_tokens=5000, stop_regex="the end")
    req.output_scan = Counted([1], counting)
    feed(req, *one_by_one("a lazy dog, é " * 200), decode_text=counting)
    assert max(num_decoded) <= 8
    assert max(num_searched) <= 8


def test_a_scan_begins_anew_when_ids_are_dropped() -> None:
    req = feed(make_req(stop_regex="ac"), *one_by_one("ab"))
    del req.output_ids[1:]
    assert_ends(feed(req, *one_by_one("c")), FinishRegex("ac", "ac"), 2)
