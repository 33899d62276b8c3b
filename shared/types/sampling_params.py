"""Sampling parameters and stop conditions of a request."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from diptych.shared.types.sampling_checks import (
    MAX_FLOAT,
    check_asked,
    check_biases,
    check_token_ids,
    checked_bad_words,
    is_number,
)
from diptych.shared.types.stops import check_stop_regexes, check_stop_strings

MIN_TEMPERATURE = 1e-6
"""A temperature below this means greedy: dividing by it would overflow half precision."""
MAX_SAMPLES = 1024
"""The largest `n`: each sample is a request of its own."""

FILTER_ORDERS = ("joint", "sequential")

GRAMMAR_FIELDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
"""Parameters that constrain the output; they exclude each other."""

INTEGERS = {  # and the least value of each
    "max_new_tokens": 0,
    "min_new_tokens": 0,
    "n": 1,
    "top_logprobs_num": 0,
    "logprob_start_len": -1,
}
NUMBERS = {  # and the range of each
    "temperature": (0.0, MAX_FLOAT),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, MAX_FLOAT),
}
LISTS = (
    "stop",
    "stop_token_ids",
    "stop_regex",
    "choice",
    "reasoning_end",
    "allowed_token_ids",
    "bad_words",
    "token_ids_logprob",
)
TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "token_ids_logprob", "reasoning_end")
WITHOUT_ZERO = ("top_p", "repetition_penalty")
BOOLEANS = (
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "return_logprob",
    "json_object",
)


@dataclass(frozen=True)
class SamplingParams:
    """Immutable and validated on construction (`ValueError` naming the field, its value and its range).

    Limits that depend on the model (token ids within the vocabulary, prompt within the context) are
    checked by `check_against_vocab` and by the engine when the request is submitted.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0  # stop tokens are masked before this many output tokens
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # -1 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    filter_order: str = "joint"  # top_p is a share of all tokens; "sequential": of those that top_k keeps
    frequency_penalty: float = 0.0  # times the count in the output
    presence_penalty: float = 0.0  # once for a token that is in the output
    repetition_penalty: float = 1.0  # prompt and output, the Hugging Face definition
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[str, ...] = ()  # texts that the answer never contains, as the tokenizer writes them
    bad_word_ids: tuple[
        tuple[int, ...], ...
    ] = ()  # the same as token ids; the engine adds those of bad_words
    seed: int | None = None  # None: a new one for each request
    n: int = 1  # samples of one prompt, at most MAX_SAMPLES; sample i derives its own seed
    stop: tuple[str, ...] = ()  # limits of both in shared/types/stops.py
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False  # disables the end-of-sequence tokens and stop_token_ids
    no_stop_trim: bool = False  # keep the matched stop string or stop token in the text
    skip_special_tokens: bool = True
    return_logprob: bool = False  # log-probabilities of the output tokens
    top_logprobs_num: int = 0  # alternatives reported for each token
    token_ids_logprob: tuple[int, ...] = ()  # tokens whose log-probability is reported at each token
    logprob_start_len: int = -1  # >= 0: log-probabilities of the prompt from this position on

    # What the output must look like (shared/grammar): at most one of these.
    json_schema: str | dict[str, Any] | None = None  # JSON that satisfies the schema
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a text that the whole regex matches
    ebnf: str | None = None  # a text of the rule `root`
    choice: tuple[str, ...] | None = None  # one of these texts
    structural_tag: str | None = None  # xgrammar's format: tags with a JSON schema inside
    reasoning_end: tuple[int, ...] = ()  # tokens up to which the output is free, as in a reasoning block
    reasoning_start: int | None = None  # only an output that begins with this token is free; None: any is

    def __post_init__(self) -> None:
        for name in LISTS:
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, getattr(SamplingParams, name))  # the default
                continue
            if isinstance(value, (str, int)):
                value = (value,)
            elif not isinstance(value, (list, tuple, set, frozenset)):
                raise ValueError(f"{name} must be one value or a list of them, got {value!r:.80}")
            object.__setattr__(self, name, tuple(value))
        for name, least in INTEGERS.items():
            value = getattr(self, name)
            if not is_number(value, int) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        for name, (low, high) in NUMBERS.items():
            value, is_open = getattr(self, name), name in WITHOUT_ZERO
            # No range contains NaN.
            if not is_number(value, (int, float)) or not low <= value <= high or (is_open and value == 0):
                range_ = f"{'(' if is_open else '['}{low:g}, {high:g}]"
                raise ValueError(f"{name} must be a number in {range_}, got {value!r}")
        for name in BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.n > MAX_SAMPLES:
            raise ValueError(f"n must be at most {MAX_SAMPLES}, got {self.n}")
        if not is_number(self.top_k, int) or (self.top_k < 1 and self.top_k != -1):
            raise ValueError(f"top_k must be -1 (keep all) or at least 1, got {self.top_k!r}")
        if self.filter_order not in FILTER_ORDERS:
            raise ValueError(f"filter_order must be one of {FILTER_ORDERS}, got {self.filter_order!r:.40}")
        if self.seed is not None and not (is_number(self.seed, int) and -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed must be a 64-bit integer or None, got {self.seed!r}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens ({self.max_new_tokens})"
            )
        for name, default in (("top_logprobs_num", 0), ("logprob_start_len", -1), ("token_ids_logprob", ())):
            value = getattr(self, name)
            if value != default and not self.return_logprob:
                raise ValueError(f"{name}={value} needs return_logprob=True")
        for name in TOKEN_IDS:
            if getattr(self, name):
                check_token_ids(name, getattr(self, name))
        if self.token_ids_logprob or self.allowed_token_ids is not None:
            check_asked(self.token_ids_logprob, self.allowed_token_ids)
        if self.bad_words or self.bad_word_ids != ():
            object.__setattr__(self, "bad_word_ids", checked_bad_words(self.bad_words, self.bad_word_ids))
        if self.reasoning_start is not None:
            check_token_ids("reasoning_start", (self.reasoning_start,))
        if self.stop:
            check_stop_strings(self.stop)
        if self.stop_regex:
            check_stop_regexes(self.stop_regex)
        if self.logit_bias != {}:
            check_biases(self.logit_bias)
        if self.given_grammars:
            self._check_grammar()

    def _check_grammar(self) -> None:
        """A schema that is a mapping becomes its text."""
        if isinstance(self.json_schema, Mapping):
            try:
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"json_schema is no JSON: {error}") from None
        for name in ("json_schema", "regex", "ebnf", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a text or None, got {value!r:.80}")
        if self.choice == ():
            raise ValueError("choice must hold at least one text")
        if any(not isinstance(text, str) or not text for text in self.choice or ()):
            raise ValueError(f"choice must hold non-empty strings, got {self.choice!r:.80}")
        if len(self.given_grammars) > 1:
            raise ValueError(f"{' and '.join(self.given_grammars)} exclude each other: give one of them")

    def updated(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed. `max_tokens` is another name of max_new_tokens. An unknown name
        raises `ValueError` with the nearest right ones."""
        names = [f.name for f in fields(self)]
        if "max_tokens" in changes:
            if "max_new_tokens" in changes:
                raise ValueError("max_tokens and max_new_tokens are the same: give one of them")
            changes["max_new_tokens"] = changes.pop("max_tokens")
        for name in changes:
            if name not in names:
                near = difflib.get_close_matches(name, names) or names
                raise ValueError(f"unknown sampling parameter {name!r}; did you mean {', '.join(near)}?")
        return replace(self, **changes) if changes else self

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def given_grammars(self) -> list[str]:
        """Names of the parameters that constrain the output: none or one."""
        return [name for name in GRAMMAR_FIELDS if getattr(self, name) != getattr(SamplingParams, name)]

    @property
    def needs_penalty(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def bans_sequences(self) -> bool:
        """Whether what it bans depends on the output: a bad word has several tokens."""
        return any(len(ids) > 1 for ids in self.bad_word_ids)

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a ban changes the logits."""
        return bool(
            self.logit_bias or self.min_new_tokens or self.bad_word_ids or self.allowed_token_ids is not None
        )

    def check_against_vocab(self, vocab_size: int) -> None:
        """Raise `ValueError` for a token that the parameters name and the model cannot produce."""
        named = {name: getattr(self, name) or () for name in TOKEN_IDS}
        for name, ids in {**named, "logit_bias": self.logit_bias}.items():
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(
                        f"{name} names token {token_id}, but the vocabulary has {vocab_size} ids"
                    )


def params_of_prompts(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt: the same for all, or as given. Raises `ValueError` for another number of them."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"sampling_params are SamplingParams, or a list of them, got {params!r:.80}")
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts")
    return list(params)
