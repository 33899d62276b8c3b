"""Special tokens in a text that is decoded: each control token becomes one character.

Unicode reserves 32 characters that no text may hold (U+FDD0 to U+FDEF). They stand for the tokens that
control a parser, so that a marker's token and the same letters written out stay two things. Where a model
writes the bytes of such a character itself, it is decoded as U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from diptych.shared.interfaces.detokenizer import TokenText
from diptych.shared.text.stop_text import REPLACEMENT
from diptych.shared.text.tokenizer import Tokenizer

CONTROLS = "\ufdd0-\ufdef"
"""For the class of a regex."""
MAX_CONTROLS = 32

_RESERVED = re.compile(f"[{CONTROLS}]")


def control_chars(markers: Sequence[str], tokenizer: Tokenizer | None) -> dict[str, str]:
    """Marker -> character, for the markers that are special tokens."""
    if tokenizer is None:
        return {}
    special = [m for m in dict.fromkeys(markers) if tokenizer.token_to_id(m) in tokenizer.special_ids]
    assert len(special) <= MAX_CONTROLS, special
    return {marker: chr(0xFDD0 + i) for i, marker in enumerate(special)}


class ControlText(TokenText):
    """A tokenizer's text, with characters in place of control tokens."""

    def __init__(self, tokenizer: Tokenizer, chars: Mapping[str, str]) -> None:
        """chars: of `control_chars`."""
        self._tokenizer = tokenizer
        self._chars = {tokenizer.token_to_id(marker): char for marker, char in chars.items()}
        self.special_ids = tokenizer.special_ids - self._chars.keys()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._chars.keys().isdisjoint(ids):
            return self._plain(ids, skip_special_tokens)
        return "".join(
            "".join(self._chars[i] for i in run)
            if is_control
            else self._plain(list(run), skip_special_tokens)
            for is_control, run in groupby(ids, self._chars.__contains__)
        )

    def _plain(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text if text.isascii() else _RESERVED.sub(REPLACEMENT, text)
