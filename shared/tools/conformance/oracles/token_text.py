"""A small tokenizer for checks: single bytes, words, and special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.shared.interfaces import Detokenizer
from diptych.shared.types import FinishReason, SamplingParams

WORDS = (" stop", " the stop sign", "Once", " upon", " a", " time", "é", " 世界")
SPECIALS = ("<|end|>", "<|start|>")
FIRST_WORD = 256
FIRST_SPECIAL = FIRST_WORD + len(WORDS)
VOCAB_SIZE = FIRST_SPECIAL + len(SPECIALS)
END = FIRST_SPECIAL

REPLACEMENT = "\ufffd"


class SmallTokenizer:
    """Ids below 256 are bytes, then words, then special tokens. `is_fallback`: as with byte fallback, a run
    of bytes that ends inside a character is replaced as a whole, and the first space of a text is dropped.
    `num_decoded` counts ids."""

    def __init__(self, is_fallback: bool = False) -> None:
        self.is_fallback = is_fallback
        self.special_ids = frozenset(range(FIRST_SPECIAL, VOCAB_SIZE))
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(ids)
        pieces: list[str] = []
        run = b""
        for token_id in ids:
            if token_id < FIRST_WORD:
                run += bytes([token_id])
                continue
            if not self.is_fallback and token_id < FIRST_SPECIAL:
                run += WORDS[token_id - FIRST_WORD].encode()
                continue
            pieces.append(self._text_of(run))
            run = b""
            if token_id < FIRST_SPECIAL:
                pieces.append(WORDS[token_id - FIRST_WORD])
            elif not skip_special_tokens:
                pieces.append(SPECIALS[token_id - FIRST_SPECIAL])
        text = "".join([*pieces, self._text_of(run)])
        return text.removeprefix(" ") if self.is_fallback else text

    def _text_of(self, run: bytes) -> str:
        if not self.is_fallback:
            return run.decode(errors="replace")
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)


def byte_ids(text: str) -> list[int]:
    """One token for each byte."""
    return list(text.encode())


def word_ids(text: str) -> list[int]:
    """Ids of a text, from left to right: the longest matching word of the vocabulary, otherwise a byte."""
    ids, rest = [], text
    while rest:
        fitting = [word for word in WORDS if rest.startswith(word)]
        word = max(fitting, key=len, default=rest[0])
        ids += [FIRST_WORD + WORDS.index(word)] if fitting else byte_ids(word)
        rest = rest[len(word) :]
    return ids


def steps_of(ids: Sequence[int], size: int) -> list[list[int]]:
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)]


def stream(
    impl: type[Detokenizer],
    tokenizer: SmallTokenizer,
    steps: Sequence[Sequence[int]],
    reason: FinishReason | None = None,
    params: SamplingParams | None = None,
    prompt: Sequence[int] = (),
    finished_len: int | None = None,
) -> list[str]:
    """The text piece of each step; the last step has finish reason `reason`."""
    detokenizer = impl(tokenizer, params or SamplingParams(), prompt)
    pieces = [detokenizer.append(ids) for ids in steps[:-1]]
    pieces.append(detokenizer.append(steps[-1], reason, finished_len))
    return pieces
