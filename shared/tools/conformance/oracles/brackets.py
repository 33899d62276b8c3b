"""A small stateful grammar, balanced brackets over token ids, with the interface of a matcher."""

from __future__ import annotations

import torch

END, OPEN, CLOSE, NUM_KINDS, MAX_NESTED = 0, 40, 50, 10, 5
"""END ends a complete text. OPEN + kind and CLOSE + kind are brackets; other tokens are never allowed."""


class BracketMatcher:
    """See `diptych.shared.grammar.matcher.Matcher`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def open_kinds(self) -> list[int]:
        """The kinds of the open brackets, innermost last."""
        found: list[int] = []
        for token_id in self.tokens:
            if token_id >= CLOSE:
                found.pop()
            elif token_id >= OPEN:
                found.append(token_id - OPEN)
        return found

    def allowed(self) -> list[int]:
        """Token ids that may come next."""
        kinds = self.open_kinds()
        closing = [CLOSE + kinds[-1]] if kinds else [END]
        return closing + [OPEN + kind for kind in range(NUM_KINDS if len(kinds) < MAX_NESTED else 0)]

    def accept_token(self, token_id: int) -> bool:
        if self.is_terminated() or token_id not in self.allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> bool:
        assert not self.is_terminated()
        bitmask[index] = mask_of(self.allowed(), 32 * bitmask.shape[1])
        return True

    def is_terminated(self) -> bool:
        return END in self.tokens


def mask_of(token_ids: list[int], vocab_size: int) -> torch.Tensor:
    """The mask that allows these tokens."""
    words = [0] * -(-vocab_size // 32)
    for token_id in set(token_ids):
        words[token_id // 32] |= 1 << token_id % 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)
