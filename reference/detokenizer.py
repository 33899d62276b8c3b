"""Token ids to text, piece by piece: what was given out is never taken back."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.shared.interfaces import detokenizer as interface
from diptych.shared.text.stop_text import (
    MAX_CHARACTER_BYTES,
    NUM_CONTEXT_TOKENS,
    REPLACEMENT,
    RegexTimeout,
    num_held_chars,
    search_stop_regex,
)
from diptych.shared.types import FinishReason, FinishRegex, FinishString, FinishToken, SamplingParams

_MAX_PENDING_TOKENS = 16
"""More tokens than any incomplete character can have: then the bytes are no characters."""


class IncrementalDetokenizer(interface.Detokenizer):
    """A token is decoded together with the piece before it, so the cost of a token does not depend on the
    length of the text."""

    def __init__(
        self, tokenizer: interface.TokenText, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._num_ids = 0
        self._context = self._prompt_tail(prompt_ids)  # ids whose text was given out
        self._context_text = tokenizer.decode(self._context)
        self._pending: list[int] = []  # ids whose text was not
        self._held_text = ""  # decoded, not given out
        self._given: list[str] = []  # with no_stop_trim, because a match may begin in it
        self._is_finished = False

    def append(
        self,
        new_ids: Sequence[int],
        finished_reason: FinishReason | None = None,
        finished_len: int | None = None,
    ) -> str:
        assert not self._is_finished, "text after the end"
        if finished_len is not None:
            new_ids = new_ids[: max(finished_len - self._num_ids, 0)]
        self._num_ids += len(new_ids)
        self._is_finished = finished_reason is not None
        keeps_stop = self._params.no_stop_trim
        if not keeps_stop and isinstance(finished_reason, FinishToken) and new_ids:
            assert new_ids[-1] == finished_reason.token_id
            new_ids = new_ids[:-1]
        visible = self._visible(new_ids)
        self._pending += visible
        self._held_text += self._take_text(len(visible))

        # --8<-- [start:hold-stop-strings]
        stop, stop_regex = self._params.stop, self._params.stop_regex
        if not (stop or stop_regex):
            text = self._held_text
        elif keeps_stop:
            text = self._held_text
            if self._is_finished:
                given = "".join(self._given)
                text = (given + text)[len(given) : _match(given + text, finished_reason)[1]]
            self._given.append(text)
        elif self._is_finished:
            text = self._held_text[: _match(self._held_text, finished_reason)[0]]
        elif stop_regex:
            text = ""
        else:
            text = self._held_text[: len(self._held_text) - num_held_chars(self._held_text, stop)]
        self._held_text = self._held_text[len(text) :]
        return text
        # --8<-- [end:hold-stop-strings]

    # --8<-- [start:take-text]
    def _take_text(self, num_new: int) -> str:
        """Text of the pending tokens that is certain. They become the context."""
        if not self._pending:
            return ""
        text = self._text_after_context(self._pending)
        if text and not text.endswith(REPLACEMENT):
            return self._take(len(self._pending), text)
        # With byte fallback a run of bytes that ends inside a character is U+FFFD as
        # a whole: the characters before that end are taken without it. (With one new
        # token nothing before it has become whole: it was tried when it was the end.)
        num_whole, whole = self._whole_characters() if num_new > 1 else (0, "")
        if num_whole:
            return self._take(num_whole, whole) + self._take_text(1)
        if self._is_finished:
            return self._take(len(self._pending), text)
        if len(self._pending) > _MAX_PENDING_TOKENS:
            return self._take(*self._certain_part(text))
        return ""

    # --8<-- [end:take-text]

    def _take(self, num_tokens: int, text: str) -> str:
        """Make the first pending tokens, whose text this is, the context of the others."""
        if num_tokens:
            self._context, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
            self._context_text = self._tokenizer.decode(self._context)
        return text

    def _whole_characters(self) -> tuple[int, str]:
        """How many pending tokens come before an incomplete last character, and their text."""
        for num_kept in range(1, min(MAX_CHARACTER_BYTES, len(self._pending))):
            text = self._text_after_context(self._pending[:-num_kept])
            if text and not text.endswith(REPLACEMENT):
                return len(self._pending) - num_kept, text
        return 0, ""

    def _certain_part(self, text: str) -> tuple[int, str]:
        """Return how many of many pending tokens that make no character later tokens cannot change, and their
        text. A character can only begin in the last few."""
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


def _match(text: str, reason: FinishReason | None) -> tuple[int, int]:
    """Where the stop text that ended `text` begins and ends; the end of the text for another reason."""
    if isinstance(reason, FinishRegex):
        try:
            match = search_stop_regex(reason.pattern, text)
        except RegexTimeout:
            match = None
        if match is not None:
            return match[0], match[0] + len(match[1])
    if isinstance(reason, (FinishString, FinishRegex)) and reason.matched in text:
        start = text.index(reason.matched)
        return start, start + len(reason.matched)
    return len(text), len(text)
