"""Token ids of a conversation, of which each turn repeats what was there before.

A tokenizer first cuts a text at its added tokens, such as `<|im_start|>`, and encodes each segment between
two of them by itself. So the ids of a segment can be kept: the next turn of a conversation of 38,000 tokens
encodes only its last messages.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

MAX_BYTES = 32 * 2**20
"""Of all segments that are kept, and of their ids."""
ENTRY_BYTES = 200
"""Of a segment, beside its text and its ids."""
MAX_CUTS = 512
"""Tokens at which texts are cut. A character with which many tokens begin is compared with each of them."""

Encode = Callable[[str], list[int]]

# Steps whose result for a segment does not depend on the text before it.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace"}
_PRE_TOKENIZERS = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "ByteLevel"}


class Segments:
    """Encodes texts segment by segment and keeps the ids of the latest segments. Threads may share it."""

    def __init__(self, encode: Encode, added: dict[str, int], max_bytes: int = MAX_BYTES) -> None:
        """encode: of a text without added tokens. added: token -> id."""
        self._encode, self._added = encode, added
        longest_first = sorted(added, key=len, reverse=True)  # the tokenizer takes the longest, too
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes_left = max_bytes
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

    def _ids_of(self, segment: str) -> array[int]:
        with self._lock:
            if segment in self._kept:
                self._kept.move_to_end(segment)
                return self._kept[segment]
        ids = array("i", self._encode(segment))
        with self._lock:
            if segment not in self._kept:
                self._kept[segment] = ids
                self._bytes_left -= num_bytes(segment, ids)
            while self._bytes_left < 0:
                self._bytes_left += num_bytes(*self._kept.popitem(last=False))
        return ids


def num_bytes(segment: str, ids: array[int]) -> int:
    """Memory of an entry."""
    return ENTRY_BYTES + sys.getsizeof(segment) + ids.itemsize * len(ids)


def cut_tokens(hf_tokenizer: Any) -> dict[str, int] | None:
    """The added tokens at which a text may be cut -> their ids. None: the ids of a segment may depend on the
    text before it, as where only a text's first word gets a space; or there are more than MAX_CUTS."""
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is None or not all(map(_is_normalizer, _steps(backend.normalizer, "normalizers"))):
        return None
    if not all(map(_is_pre_tokenizer, _steps(backend.pre_tokenizer, "pretokenizers"))):
        return None
    added = {i: token for i, token in hf_tokenizer.added_tokens_decoder.items() if not token.normalized}
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    if getattr(hf_tokenizer, "split_special_tokens", False):  # then it encodes them as text
        return None
    cuts = {token.content: i for i, token in added.items() if token.special and token.content}
    others = {token.content: i for i, token in added.items() if not token.special and token.content}
    if _covers(others, cuts):
        cuts |= others
    return cuts if len(cuts) <= MAX_CUTS else None


def _covers(tokens: Collection[str], cuts: Collection[str]) -> bool:
    """Whether the tokenizer may take one of `tokens` where one of `cuts` begins inside it."""
    starts = {cut[:n] for cut in cuts for n in range(1, len(cut) + 1)}
    return any(
        any(cut in token for cut in cuts) or any(token[i:] in starts for i in range(1, len(token)))
        for token in tokens
    )


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
