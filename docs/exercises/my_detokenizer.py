"""Stage 12, serving: complete the functions that raise NotImplementedError.

diptych course grade 12     # in the folder of `diptych course start`
diptych check --stage 12 my_detokenizer.py

The contract is in shared/interfaces/detokenizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.shared.interfaces import detokenizer as interface
from diptych.shared.text.stop_text import (
    MAX_CHARACTER_BYTES,
    NUM_CONTEXT_TOKENS,
    REPLACEMENT,
    RegexTimeout,
    search_stop_regex,
)
from diptych.shared.types import FinishReason, FinishRegex, FinishString, FinishToken, SamplingParams

_MAX_PENDING_TOKENS = 16
"""More tokens than any incomplete character can have: then the bytes are no characters."""


class MyDetokenizer(interface.Detokenizer):
    def __init__(
        self, tokenizer: interface.TokenText, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._num_ids = 0  # output ids so far
        self._context = self._prompt_tail(prompt_ids)  # ids whose text was taken
        self._context_text = tokenizer.decode(self._context)
        self._pending: list[int] = []  # ids whose text was not
        self._held_text = ""  # taken, not given out
        self._given: list[str] = []  # with no_stop_trim, because a match may begin in it
        self._is_finished = False

    def append(
        self,
        new_ids: Sequence[int],
        finished_reason: FinishReason | None = None,
        finished_len: int | None = None,
    ) -> str:
        """Count the ids, and note in `_is_finished` whether this is the end. Add the `_visible` ids to
        `_pending` and the text of `_take_text` to `_held_text`. Give out what is certain of `_held_text`.

        Stop strings: all but the last `num_held_chars`; at the end what stands before the `_match`. With
        no_stop_trim nothing is held back, and at the end the text goes up to the end of the match. Ends: ids
        beyond finished_len, and the id of a FinishToken, have no text; with stop_regex nothing is certain
        before the end."""
        raise NotImplementedError("TODO text: the text of this step; later: what of it is held back")

    def _take_text(self, num_new: int) -> str:
        """Text of the pending tokens, as far as it is certain. `num_new`: how many are from this step.

        Text that ends in REPLACEMENT may end inside a character. Then take the tokens before it
        (`_whole_characters`, where num_new > 1), and of the others: all at the end of the request, the
        `_certain_part` of more than _MAX_PENDING_TOKENS, else none."""
        raise NotImplementedError("TODO text: which of the pending tokens have a text that will not change?")

    def _take(self, num_tokens: int, text: str) -> str:
        """The first pending tokens, whose text this is, leave `_pending` and become the context. Returns the
        text."""
        raise NotImplementedError("TODO text: what the next tokens are decoded behind")

    def _whole_characters(self) -> tuple[int, str]:
        """How many pending tokens come before an incomplete last character, and their text. (0, ""): none. At
        most MAX_CHARACTER_BYTES - 1 tokens belong to that character."""
        raise NotImplementedError("TODO characters: where the last whole character ends")

    # What follows is complete.

    def _certain_part(self, text: str) -> tuple[int, str]:
        """Return how many of many pending tokens that make no character later tokens cannot change, and their
        text.
        A character can only begin in the last few."""
        for num_kept in range(MAX_CHARACTER_BYTES, 2 * MAX_CHARACTER_BYTES):
            head = self._pending[:-num_kept]
            head_text = self._text_after_context(head)
            if text.startswith(head_text):
                return len(head), head_text
        return 0, ""

    def _text_after_context(self, ids: list[int]) -> str:
        return self._tokenizer.decode(self._context + ids)[len(self._context_text) :]

    def _visible(self, ids: Sequence[int]) -> list[int]:
        if not self._params.skip_special_tokens:
            return list(ids)
        return [token_id for token_id in ids if token_id not in self._tokenizer.special_ids]

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, and some more if the first of them begins inside a character."""
        for num_tokens in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + MAX_CHARACTER_BYTES):
            tail = self._visible(prompt_ids[-num_tokens:])
            if not self._tokenizer.decode(tail).startswith(REPLACEMENT):
                break
        return tail


def num_held_chars(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string may begin."""
    raise NotImplementedError("TODO stop strings: how much of the text may be the beginning of one")


def _match(text: str, reason: FinishReason | None) -> tuple[int, int]:
    """Where the stop text that ended `text` begins and ends: the first occurrence of FinishString.matched, or
    the match of FinishRegex.pattern (`search_stop_regex`, which may raise RegexTimeout: then
    FinishRegex.matched). The end of the text, twice, for another reason."""
    raise NotImplementedError("TODO stop strings: where the text of the client ends")
