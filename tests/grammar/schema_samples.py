"""Random answers that xgrammar allows for a schema."""

from __future__ import annotations

import json
import random
from typing import Any

import torch
import xgrammar

END = 256
CLOSING = [ord(c) for c in '"}],']


def compiler() -> xgrammar.GrammarCompiler:
    tokens = [bytes([i]) for i in range(END)] + [b"\xff<end>"]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[END]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def sample(compiled: Any, rng: random.Random, max_bytes: int = 300) -> str | None:
    """An answer, byte by byte at random; None: it has not ended in time."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = torch.zeros(1, -(-(END + 1) // 32), dtype=torch.int32)
    text = bytearray()
    while len(text) < max_bytes:
        matcher.fill_next_token_bitmask(mask, 0)
        words = mask[0].tolist()

        def may(token: int, words: list[int] = words) -> bool:
            return bool(words[token // 32] >> token % 32 & 1)

        closing = [token for token in (END, *CLOSING) if may(token)]
        if closing and rng.random() < 0.4:
            token = rng.choice(closing)
        else:
            plain = [t for t in range(32, 127) if may(t)] if rng.random() < 0.9 else []
            allowed = plain or [t for t in range(END + 1) if may(t)]
            if not allowed:
                return None
            token = rng.choice(allowed)
        assert matcher.accept_token(token)
        if token == END:
            return text.decode(errors="replace")
        text.append(token)
    return None


def as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
