"""Bad words as the token ids that the sampler bans."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from diptych.shared.types import SamplingParams


class Encoder(Protocol):
    """What is used of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def with_bad_word_ids(params: SamplingParams, tokenizer: Encoder | None) -> SamplingParams:
    """`params` with `bad_word_ids` of its bad_words: each as the tokenizer writes it at the begin of a text
    and behind a space. Raises `ValueError` where there is no tokenizer."""
    if tokenizer is None:
        raise ValueError("bad_words need a tokenizer, which this model has not")
    found = dict.fromkeys(params.bad_word_ids)
    for word in params.bad_words:
        bare, spaced = (tuple(tokenizer.encode(f"{space}{word.strip()}", False)) for space in ("", " "))
        found[bare] = None
        if spaced[-len(bare) :] != bare:  # else it is banned already
            found[spaced] = None
    return replace(params, bad_word_ids=tuple(ids for ids in found if ids))
