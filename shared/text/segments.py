"""Token ids of a conversation, of which each turn repeats what was there before.

A tokenizer first cuts a text at its added tokens, such as `<|im_start|>`, and encodes each segment between
two of them by itself. So the ids of a segment can be kept: the next turn of a conversation of 38,000 tokens
encodes its last messages only.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MAX_CHARS = 8_000_000
"""Of all segments that are kept; their ids take ten times as many bytes."""
ENTRY_CHARS = 100
"""What a segment costs beside its characters."""

Encode = Callable[[str], list[int]]

# Steps that see a segment alone, whatever stands before it.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace"}
_PRE_TOKENIZERS = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "ByteLevel"}


class Segments:
    """Encodes texts segment by segment and keeps the ids of the latest segments. Threads may share it."""

    def __init__(self, encode: Encode, added: dict[str, int], max_chars: int = MAX_CHARS) -> None:
        """encode: of a text without added tokens. added: token -> id."""
        self._encode, self._added = encode, added
        longest_first = sorted(added, key=len, reverse=True)  # as the tokenizer: the longest that begins here
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._kept: OrderedDict[str, list[int]] = OrderedDict()
        self._chars_left = max_chars
        self._lock = threading.Lock()

    def ids(self, text: str) -> list[int]:
        """What `encode` gives for all of `text`."""
        ids: list[int] = []
        for segment in self._cut.split(text) if self._cut is not None else (text,):
            if segment in self._added:
                ids.append(self._added[segment])
            elif segment:
                ids += self._ids_of(segment)
        return ids

    def _ids_of(self, segment: str) -> list[int]:
        with self._lock:
            if segment in self._kept:
                self._kept.move_to_end(segment)
                return self._kept[segment]
        ids = self._encode(segment)
        with self._lock:
            if segment not in self._kept:
                self._kept[segment] = ids
                self._chars_left -= len(segment) + ENTRY_CHARS
            while self._chars_left < 0:
                old, _ = self._kept.popitem(last=False)
                self._chars_left += len(old) + ENTRY_CHARS
        return ids


def cut_tokens(hf_tokenizer: Any) -> dict[str, int] | None:
    """The added tokens at which a text may be cut -> their ids. None: the ids of a segment may depend on what
    stands before it, as where only a text's first word gets a space."""
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is None or not all(map(_is_normalizer, _steps(backend.normalizer, "normalizers"))):
        return None
    if not all(map(_is_pre_tokenizer, _steps(backend.pre_tokenizer, "pretokenizers"))):
        return None
    added = {i: token for i, token in hf_tokenizer.added_tokens_decoder.items() if not token.normalized}
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    return {token.content: token_id for token_id, token in added.items() if token.content}


def _steps(step: Any, children: str) -> list[dict[str, Any]]:
    """A step of a tokenizer as JSON, or the steps in it."""
    if step is None:
        return []
    state = json.loads(step.__getstate__())
    return list(state[children]) if state["type"] == "Sequence" else [state]


def _is_normalizer(state: dict[str, Any]) -> bool:
    return state["type"] in _NORMALIZERS


def _is_pre_tokenizer(state: dict[str, Any]) -> bool:
    return state["type"] in _PRE_TOKENIZERS and not state.get("add_prefix_space", False)
