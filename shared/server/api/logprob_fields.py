"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Container
from typing import Any

from diptych.shared.text.token_bytes import TokenBytes
from diptych.shared.types import TokenLogprob

LOWEST = -9999.0
"""Stands for -inf, which JSON does not have."""


class TokenTexts:
    """How tokens are written: as text, or as `token_id:N`, which is unambiguous."""

    def __init__(self, token_bytes: TokenBytes | None, as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids or token_bytes is None

        self._found: dict[int, tuple[str, tuple[int, ...]]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        return self._token_bytes.of(token_id) if self._token_bytes is not None else b""

    def both_of(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """Text and bytes of a token, the same objects each time: a long answer repeats most tokens, and the
        garbage collector visits what has lists or new tuples."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self.text_of(token_id), tuple(self.bytes_of(token_id))
        return found

    def text_of(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def chat_entries(texts: TokenTexts, logprobs: list[TokenLogprob], num_top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of chat: one entry for each token."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        text, numbers = texts.both_of(token_id)
        return {
            "token": text,
            "logprob": finite(logprob) if logprob is not None else LOWEST,
            "bytes": numbers,
        }

    return [
        {
            **entry(found.token_id, found.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in alternatives(found, num_top)],
        }
        for found in logprobs
    ]


def alternatives(found: TokenLogprob, num_top: int) -> tuple[tuple[int, float], ...]:
    """The tokens that the request names, if it names any, else the likeliest."""
    return found.asked or found.top[:num_top]


def prompt_entries(
    texts: TokenTexts, logprobs: list[TokenLogprob], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: each prompt token and the likeliest in its place, by id. Ranks count from 1.
    Nothing precedes the first token."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text_of(token_id)}

    found: list[dict[str, Any] | None] = []
    for each in logprobs:
        if each.logprob is None:
            found.append(None)
            continue
        shown = {each.token_id: entry(each.token_id, each.logprob, each.rank)}
        for rank, (token_id, logprob) in enumerate(each.top[:num_top], 1):
            shown[token_id] = entry(token_id, logprob, rank)
        found.append({str(token_id): fields for token_id, fields in shown.items()})
    return found


class CompletionLogprobs:
    """`logprobs` of completions, piece by piece: offsets go on from piece to piece. `skipped`: tokens that
    are not in the text."""

    def __init__(self, texts: TokenTexts, num_top: int, skipped: Container[int] = ()) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def piece(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Write the log-probabilities of these tokens. The first prompt token has neither log-probability nor
        alternatives."""
        tokens, values, offsets = list[str](), list[float | None](), list[int]()
        tops: list[dict[str, float] | None] = []
        for found in logprobs:
            tokens.append(self._texts.text_of(found.token_id))
            offsets.append(self._offset)
            if found.token_id not in self._skipped:
                self._offset += len(self._decoder.decode(self._texts.bytes_of(found.token_id)))
            values.append(None if found.logprob is None else finite(found.logprob))
            if found.logprob is None:
                tops.append(None)
                continue
            pairs = alternatives(found, self._num_top)
            top = {self._texts.text_of(i): finite(value) for i, value in pairs}
            top.setdefault(self._texts.text_of(found.token_id), finite(found.logprob))
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
