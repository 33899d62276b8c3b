"""The bytes that a token stands for, taken from the vocabulary and not from decoded text.

A token may hold a part of a character. Decoding it alone gives U+FFFD; its bytes are exact.
"""

from __future__ import annotations

import json
import re
from functools import cache

from diptych.shared.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps token ids to bytes for the two families of vocabularies: byte-level BPE (GPT-2, Llama 3, Qwen) and
    SentencePiece with byte fallback (Llama 2, Mistral)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.hf_tokenizer.added_tokens_decoder.items()
        }
        backend = getattr(tokenizer.hf_tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str())["decoder"]) if backend is not None else ""
        self._is_byte_level = '"ByteLevel"' in decoder

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; an id without a token has none."""
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_character()
            return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 character stands for its own byte, the others follow from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
