"""A grammar that begins behind a reasoning block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from diptych.shared.grammar.matcher import BaseGrammar
from diptych.shared.interfaces.grammar import Grammar


class ReasoningGrammar(BaseGrammar):
    """Inside the block all tokens are allowed but end-of-sequence tokens: an answer has to follow. Behind it
    the inner grammar holds. start: the token with which the output may begin a block; None: the prompt has
    begun it. end: the ids that end it, one after another."""

    def __init__(
        self, inner: Grammar, start: int | None, end: Sequence[int], eos_token_ids: frozenset[int]
    ) -> None:
        self._inner = inner
        self._block_start = start
        self._block_end = list(end)
        self._eos_token_ids = eos_token_ids

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        start = self._start(output_ids)
        if start is None:
            mask = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
            for token_id in self._eos_token_ids:
                _set_bit(mask, token_id, 0)
            return mask
        mask = self._inner.next_tokens(output_ids[start:], vocab_size)
        if not output_ids and self._block_start is not None:
            mask = mask.clone()
            _set_bit(mask, self._block_start, 1)
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
        if self._block_start is not None and (not output_ids or output_ids[0] != self._block_start):
            return 0
        end, at = self._block_end, 0
        with suppress(ValueError):
            while True:
                at = output_ids.index(end[0], at) + 1
                if list(output_ids[at - 1 : at - 1 + len(end)]) == end:
                    return at - 1 + len(end)
        return None


def _set_bit(mask: torch.Tensor, token_id: int, bit: int) -> None:
    word = int(mask[token_id // 32]) & 0xFFFFFFFF
    word = word | 1 << token_id % 32 if bit else word & ~(1 << token_id % 32)
    mask[token_id // 32] = word - (1 << 32) if word >= 1 << 31 else word
