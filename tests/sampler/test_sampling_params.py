import math

import pytest

from diptych.shared.types import SamplingParams

INVALID = [
    ({"max_new_tokens": -1}, "max_new_tokens must be an integer >= 0"),
    ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer >= 0"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer >= 0"),
    ({"min_new_tokens": -1}, "min_new_tokens must be an integer >= 0"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, r"min_new_tokens \(5\) exceeds max_new_tokens \(4\)"),
    ({"temperature": -0.1}, r"temperature must be a number in \[0, 3.4e\+38\]"),
    ({"temperature": math.nan}, r"temperature must be a number in \[0, 3.4e\+38\]"),
    ({"temperature": math.inf}, r"temperature must be a number in \[0, 3.4e\+38\]"),
    ({"temperature": "1"}, r"temperature must be a number in \[0, 3.4e\+38\]"),
    ({"top_k": 0}, "top_k must be -1 .* or at least 1"),
    ({"top_k": -2}, "top_k must be -1 .* or at least 1"),
    ({"top_k": 1.0}, "top_k must be -1 .* or at least 1"),
    ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\]"),
    ({"top_p": 1.01}, r"top_p must be a number in \(0, 1\]"),
    ({"min_p": -0.01}, r"min_p must be a number in \[0, 1\]"),
    ({"min_p": 1.01}, r"min_p must be a number in \[0, 1\]"),
    ({"frequency_penalty": 2.1}, r"frequency_penalty must be a number in \[-2, 2\]"),
    ({"presence_penalty": -2.1}, r"presence_penalty must be a number in \[-2, 2\]"),
    ({"repetition_penalty": 0.0}, r"repetition_penalty must be a number in \(0, 3.4e\+38\]"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias keys must be token ids"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias keys must be token ids"),
    ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\] must be a finite number or -inf"),
    ({"logit_bias": {5: math.inf}}, r"logit_bias\[5\] must be a finite number or -inf"),
    ({"logit_bias": {5: 10**400}}, r"logit_bias\[5\] must be a finite number or -inf"),
    ({"logit_bias": None}, "logit_bias must map token ids to numbers, got None"),
    ({"logit_bias": [1, 2]}, "logit_bias must map token ids to numbers"),
    ({"temperature": 10**400}, r"temperature must be a number in \[0, 3.4e\+38\]"),
    ({"temperature": 1e39}, r"temperature must be a number in \[0, 3.4e\+38\]"),
    ({"repetition_penalty": 1e39}, r"repetition_penalty must be a number in \(0, 3.4e\+38\]"),
    ({"seed": 2**63}, "seed must be a 64-bit integer"),
    ({"seed": 1.0}, "seed must be a 64-bit integer"),
    ({"n": 0}, "n must be an integer >= 1"),
    ({"stop": ("a", "")}, "stop must hold non-empty strings"),
    ({"stop": (3,)}, "stop must hold non-empty strings"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids must hold token ids"),
    ({"stop_token_ids": ("a",)}, "stop_token_ids must hold token ids"),
    ({"stop_regex": ("(",)}, "stop_regex .* is not a valid pattern"),
    ({"stop_regex": ("a*",)}, "stop_regex .* matches the empty text"),
    ({"stop_regex": (1,)}, "stop_regex must hold patterns"),
    ({"stop_regex": ("a",) * 17}, "stop_regex takes at most 16 texts, got 17"),
    ({"stop_regex": "a|" * 5000 + "b"}, "stop_regex takes texts of at most 512 characters, got 10001"),
    ({"stop_regex": "((a{1000}){1000}){1000}b"}, "stop_regex repeats too often: .* at most 50000"),
    ({"stop_regex": [f"a{{5000}}{i}" for i in range(10)]}, "stop_regex repeats too often"),
    ({"stop": ("a",) * 17}, "stop takes at most 16 texts, got 17"),
    ({"stop": "a" * 513}, "stop takes texts of at most 512 characters, got 513"),
    ({"stop": 3.5}, "stop must be one value or a list of them, got 3.5"),
    ({"stop": {"a": 1}}, "stop must be one value or a list"),
    ({"stop_token_ids": 3.5}, "stop_token_ids must be one value or a list"),
    ({"choice": 3.5}, "choice must be one value or a list"),
    ({"top_logprobs_num": -1, "return_logprob": True}, "top_logprobs_num must be an integer >= 0"),
    ({"top_logprobs_num": 1}, "top_logprobs_num=1 needs return_logprob"),
    ({"logprob_start_len": 0}, "logprob_start_len=0 needs return_logprob"),
    ({"logprob_start_len": -2}, "logprob_start_len must be an integer >= -1"),
    ({"token_ids_logprob": (3,)}, r"token_ids_logprob=\(3,\) needs return_logprob"),
    ({"token_ids_logprob": (-3,), "return_logprob": True}, "token_ids_logprob must hold token ids"),
    (
        {"token_ids_logprob": (3,) * 257, "return_logprob": True},
        "token_ids_logprob takes at most 256 entries",
    ),
    ({"allowed_token_ids": ()}, "allowed_token_ids must hold at least one token id"),
    ({"allowed_token_ids": (True,)}, "allowed_token_ids must hold token ids"),
    ({"bad_words": ("a", " ")}, "bad_words must hold words of at most 512 characters"),
    ({"bad_words": ("a" * 513,)}, "bad_words must hold words of at most 512 characters"),
    ({"bad_words": ("a",) * 257}, "bad_words takes at most 256 entries"),
    ({"bad_word_ids": ((1, 2), ())}, "bad_word_ids must hold lists of token ids"),
]


@pytest.mark.parametrize(("params", "message"), INVALID, ids=[str(p) for p, _ in INVALID])
def test_an_invalid_value_is_refused_by_name_and_range(params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_a_slow_stop_regex_is_valid_at_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters are checked in each process that gets them: all must come to the same verdict."""
    for seconds in (0.1, 0.0):
        monkeypatch.setattr("diptych.shared.types.stops.REGEX_CHECK_SECONDS", seconds)
        SamplingParams(stop_regex=(r"(?:^|$){19}\b",) * 2)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"max_new_tokens": 0},
        {"logit_bias": {3: -math.inf}},
        {"frequency_penalty": -2},
    ],
)
def test_the_limits_themselves_are_allowed(params: dict) -> None:
    SamplingParams(**params)


LARGE_REGEXES = (
    "(a{1000}){1000}b",
    "(a{1000,}){1000}b",
    "(a{1000}){,1000}b",
    "(?:(a{40}){40}){40}b",
    "((?#a comment)a{1000})(?#another){1000}b",
    "(?x) (a{1 0 0 0}) { 1000 } b",
    "(?x)(a{1000}) # a comment\n{1000} b",
    "[#](?x)(a{1000}) #\n{1000} b",
    "(?:a{1000}){e<=1}{1000}",
    f"({'a+' * 240}){{1000}}b",
    "a{1000000}b",
)


@pytest.mark.parametrize("pattern", LARGE_REGEXES)
def test_a_large_stop_regex_is_refused_before_it_is_compiled(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regex.compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=r"repeats too often|comments of verbose mode"):
        SamplingParams(stop_regex=pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{4}-\d{2}-\d{2}",
        r"(?:\d{1,3}\.){3}\d{1,3}",
        r"[\w.]{1,64}@[\w.]{1,255}\.\p{L}{2,24}",
        "(?x) a # a comment",
        r"(?:[A-Z][a-z]{1,20} ){2,50}\{END\}",
        f"(?:{'word|' * 90}last){{9}}",
    ],
)
def test_usual_stop_regexes_are_allowed(pattern: str) -> None:
    assert SamplingParams(stop_regex=pattern).stop_regex == (pattern,)


def test_single_stops_become_tuples() -> None:
    params = SamplingParams(stop="x", stop_token_ids=3, stop_regex=r"\d")
    assert (params.stop, params.stop_token_ids, params.stop_regex) == (("x",), (3,), (r"\d",))
    assert SamplingParams(stop=None, stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 9e-7}, True),
        ({"temperature": 1e-6}, False),
        ({"top_k": 1}, True),
    ],
)
def test_what_is_greedy(params: dict, is_greedy: bool) -> None:
    assert SamplingParams(**params).is_greedy == is_greedy


@pytest.mark.parametrize("params", [{"stop_token_ids": (10,)}, {"logit_bias": {10: 1.0}}])
def test_ids_outside_the_vocabulary_are_refused(params: dict) -> None:
    SamplingParams(**params).check_against_vocab(11)
    with pytest.raises(ValueError, match=r"names token 10, but the vocabulary has 10 ids"):
        SamplingParams(**params).check_against_vocab(10)
