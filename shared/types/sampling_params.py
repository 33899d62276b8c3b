"""Sampling parameters and stop conditions of a request."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import regex

MIN_TEMPERATURE = 1e-6
"""A temperature below this means greedy: dividing by it would overflow half precision."""
MAX_FLOAT = 3.4e38
"""Sampling computes in float32, where a larger number is infinite."""
MAX_SAMPLES = 1024
"""The largest `n`: each sample is a request of its own."""
REGEX_CHECK_SECONDS = 0.5
"""Time limit of trying a stop regex on the empty text."""

GRAMMAR_FIELDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
"""Parameters that constrain the output; they exclude each other."""


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
    frequency_penalty: float = 0.0  # times the count in the output
    presence_penalty: float = 0.0  # once for a token that is in the output
    repetition_penalty: float = 1.0  # prompt and output, the Hugging Face definition
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a new one for each request
    n: int = 1  # samples of one prompt, at most MAX_SAMPLES; sample i derives its own seed
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False  # disables the end-of-sequence tokens and stop_token_ids
    no_stop_trim: bool = False  # keep the matched stop string or stop token in the text
    skip_special_tokens: bool = True
    return_logprob: bool = False  # log-probabilities of the output tokens
    top_logprobs_num: int = 0  # alternatives reported for each token
    logprob_start_len: int = -1  # >= 0: log-probabilities of the prompt from this position on

    # What the output must look like (shared/grammar): at most one of these.
    json_schema: str | dict[str, Any] | None = None  # JSON that satisfies the schema
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a text that the whole regex matches
    ebnf: str | None = None  # a text of the rule `root`
    choice: tuple[str, ...] = ()  # one of these texts
    structural_tag: str | None = None  # xgrammar's format: tags with a JSON schema inside
    reasoning_first: bool = False  # a reasoning block may come before the constrained text

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "stop_regex", "choice"):
            value = getattr(self, name)
            if value is None:
                value = ()
            elif isinstance(value, (str, int)):
                value = (value,)
            object.__setattr__(self, name, tuple(value))
        self._check_int("max_new_tokens", at_least=0)
        self._check_int("min_new_tokens", at_least=0)
        self._check_int("n", at_least=1, at_most=MAX_SAMPLES)
        self._check_booleans()
        self._check_int("top_logprobs_num", at_least=0)
        self._check_int("logprob_start_len", at_least=-1)
        self._check_float("temperature", low=0.0)
        self._check_float("top_p", low=0.0, high=1.0, low_open=True)
        self._check_float("min_p", low=0.0, high=1.0)
        self._check_float("frequency_penalty", low=-2.0, high=2.0)
        self._check_float("presence_penalty", low=-2.0, high=2.0)
        self._check_float("repetition_penalty", low=0.0, low_open=True)
        if not _is_int(self.top_k) or (self.top_k < 1 and self.top_k != -1):
            raise ValueError(f"top_k must be -1 (keep all) or at least 1, got {self.top_k!r}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens ({self.max_new_tokens})"
            )
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed must be a 64-bit integer or None, got {self.seed!r}")
        if self.top_logprobs_num and not self.return_logprob:
            raise ValueError(f"top_logprobs_num={self.top_logprobs_num} needs return_logprob=True")
        if self.logprob_start_len >= 0 and not self.return_logprob:
            raise ValueError(f"logprob_start_len={self.logprob_start_len} needs return_logprob=True")
        self._check_stops()
        self._check_bias()
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
        if any(not isinstance(text, str) or not text for text in self.choice):
            raise ValueError(f"choice must hold non-empty strings, got {self.choice!r:.80}")
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) not in (None, False, ())]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")

    def _check_stops(self) -> None:
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")
        if any(not _is_int(t) or t < 0 for t in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must hold token ids, got {self.stop_token_ids!r}")
        for pattern in self.stop_regex:
            if not isinstance(pattern, str):
                raise ValueError(f"stop_regex must hold patterns (strings), got {pattern!r}")
            try:
                matches_nothing = regex.compile(pattern).search("", timeout=REGEX_CHECK_SECONDS) is not None
            except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
                raise ValueError(f"stop_regex {pattern!r} is not a valid pattern: {error}") from None
            if matches_nothing:
                raise ValueError(
                    f"stop_regex {pattern!r} matches the empty text: the output would always be empty"
                )

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token_id, bias in self.logit_bias.items():
            if not _is_int(token_id) or token_id < 0:
                raise ValueError(f"logit_bias keys must be token ids, got {token_id!r}")
            if not (_is_finite(bias) or bias == -math.inf):
                raise ValueError(
                    f"logit_bias[{token_id}] must be a finite number or -inf (never produce), got {bias!r}"
                )

    def _check_booleans(self) -> None:
        for name in (
            "ignore_eos", "no_stop_trim", "skip_special_tokens", "return_logprob", "json_object",
            "reasoning_first",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")

    def _check_int(self, name: str, at_least: int, at_most: int | None = None) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < at_least:
            raise ValueError(f"{name} must be an integer >= {at_least}, got {value!r}")
        if at_most is not None and value > at_most:
            raise ValueError(f"{name} must be at most {at_most}, got {value!r}")

    def _check_float(self, name: str, low: float, high: float = MAX_FLOAT, low_open: bool = False) -> None:
        value = getattr(self, name)
        is_number = _is_finite(value) and not isinstance(value, bool)
        if not is_number or value < low or value > high or (low_open and value == low):
            left = "(" if low_open else "["
            raise ValueError(f"{name} must be a number in {left}{low:g}, {high:g}], got {value!r}")

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
    def needs_penalty(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def check_against_vocab(self, vocab_size: int) -> None:
        """Raise `ValueError` for a stop token or a bias whose id the model cannot produce."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(
                        f"{name} names token {token_id}, but the vocabulary has {vocab_size} ids"
                    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """A finite number that fits a float: integers may be too large."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False
