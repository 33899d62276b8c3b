"""Contract of the detokenizer: token ids of one request to pieces of text, for a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from diptych.shared.types import FinishReason, SamplingParams


class TokenText(Protocol):
    """What a detokenizer uses of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids. Bytes that form no character become U+FFFD. Some tokenizers drop the space in
        front of the first word, and decode a run of bytes that ends inside a character to U+FFFD as a
        whole."""


class Detokenizer(ABC):
    """The text of one request, piece by piece. What was given out is never taken back: all pieces together
    are the decoded output, cut off before the stop token, before the first occurrence of the stop string, or
    before the regex's match. With `no_stop_trim` the cut is behind it, and the stop token is no cut.

    A piece is given out as soon as it is certain. Held back are tokens that end inside a character, and,
    without no_stop_trim, text with which a stop string may begin; at the end the rest is given out. A regex's
    match may begin anywhere, so with stop_regex (and without no_stop_trim) the text comes in one piece at the
    end. Special tokens have
    no text, unless skip_special_tokens is False.

    The cost of a token does not depend on the length of the text.
    """

    @abstractmethod
    def __init__(self, tokenizer: TokenText, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        """prompt_ids: the text before the output. None of it is given out, but it decides whether the first
        word begins with a space."""

    @abstractmethod
    def append(
        self,
        new_ids: Sequence[int],
        finished_reason: FinishReason | None = None,
        finished_len: int | None = None,
    ) -> str:
        """The text that can be given out now, after the ids of one step (none, one or several). With a
        `finished_reason` it is the rest, and output ids beyond the first `finished_len` (None: all count) are
        left out; a FinishToken names the last id. No call follows."""
