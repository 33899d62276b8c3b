"""A grammar that begins behind a reasoning block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diptych.shared.grammar.matcher import BaseGrammar
from diptych.shared.interfaces.grammar import Grammar
from diptych.shared.text.tokenizer import Tokenizer

THINK_START, THINK_END = "<think>", "</think>"


class ReasoningTokens(NamedTuple):
    """Ids of the tokens around a reasoning block."""

    start: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ReasoningTokens | None:
        """None for a tokenizer in which the markers are not one token each."""
        start, end = tokenizer.token_to_id(THINK_START), tokenizer.token_to_id(THINK_END)
        return None if start is None or end is None else cls(start, end)

    def is_open_after(self, prompt_ids: Sequence[int]) -> bool | None:
        """Whether a block is open at the prompt's end; None: the prompt has neither marker."""
        for token_id in reversed(prompt_ids):
            if token_id in self:
                return token_id == self.start
        return None


class ReasoningGrammar(BaseGrammar):
    """Inside the block all tokens are allowed but end-of-sequence tokens: an answer has to follow. Behind it
    the inner grammar holds. `is_open`: the prompt has begun the block; else the output may begin one with its
    first token."""

    def __init__(
        self, inner: Grammar, tokens: ReasoningTokens, is_open: bool, eos_token_ids: frozenset[int]
    ) -> None:
        self._inner = inner
        self._tokens = tokens
        self._is_open = is_open
        self._eos_token_ids = eos_token_ids

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        start = self._start(output_ids)
        if start is None:
            mask = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
            for token_id in self._eos_token_ids:
                _set_bit(mask, token_id, 0)
            return mask
        mask = self._inner.next_tokens(output_ids[start:], vocab_size)
        if not output_ids:
            mask = mask.clone()
            _set_bit(mask, self._tokens.start, 1)
        return mask

    def next_tokens_at_nodes(
        self, output_ids: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], vocab_size: int
    ) -> torch.Tensor:
        start = self._start(output_ids)
        if start is None or not output_ids:  # the block may end inside the tree
            return super().next_tokens_at_nodes(output_ids, token_ids, parents, vocab_size)
        return self._inner.next_tokens_at_nodes(output_ids[start:], token_ids, parents, vocab_size)

    def is_terminated(self, output_ids: Sequence[int]) -> bool:
        start = self._start(output_ids)
        return start is not None and self._inner.is_terminated(output_ids[start:])

    def _start(self, output_ids: Sequence[int]) -> int | None:
        """Where the constrained text begins; None: the block is open."""
        if not self._is_open and (not output_ids or output_ids[0] != self._tokens.start):
            return 0
        ids = list(output_ids)
        return ids.index(self._tokens.end) + 1 if self._tokens.end in ids else None


def _set_bit(mask: torch.Tensor, token_id: int, bit: int) -> None:
    word = int(mask[token_id // 32]) & 0xFFFFFFFF
    word = word | 1 << token_id % 32 if bit else word & ~(1 << token_id % 32)
    mask[token_id // 32] = word - (1 << 32) if word >= 1 << 31 else word
