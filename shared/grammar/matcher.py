"""Masks of a grammar: at the nodes of a draft tree, and from a matcher, a parser that accepts tokens one by
one and can take them back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from diptych.shared.interfaces.grammar import Grammar

MAX_MASK_SECONDS = 0.25
"""CPU time of one call. Ambiguous grammars take longer with every token, and the engine waits for them."""


class BaseGrammar(Grammar):
    """Asks `next_tokens` for the text of each node. For a grammar without a cheaper way."""

    def next_tokens_at_nodes(
        self, output_ids: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], vocab_size: int
    ) -> torch.Tensor:
        masks = torch.zeros(len(token_ids), -(-vocab_size // 32), dtype=torch.int32)
        masks[0] = self.next_tokens(output_ids, vocab_size)
        texts: list[list[int] | None] = [list(output_ids)]
        for node in range(1, len(token_ids)):
            before = texts[parents[node]]
            allowed = before is not None and allows(masks[parents[node]], token_ids[node])
            texts.append([*before, token_ids[node]] if before is not None and allowed else None)
            if allowed:
                masks[node] = self.next_tokens(texts[node], vocab_size)  # type: ignore[arg-type]
        return masks


def allows(mask: torch.Tensor, token_id: int) -> bool:
    """Whether a token's bit is set."""
    return bool(int(mask[token_id // 32]) >> token_id % 32 & 1)


class Matcher(Protocol):
    """What is needed of xgrammar's GrammarMatcher."""

    def accept_token(self, token_id: int) -> bool:
        """False, and nothing changes, for a token that may not come next."""

    def rollback(self, num_tokens: int) -> None: ...

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> bool:
        """Write row `index`. False: all tokens may come next, and the row holds anything. Not to be called
        after the end."""

    def is_terminated(self) -> bool:
        """Whether an end-of-sequence token was accepted."""


class MatcherGrammar(Grammar):
    """Keeps the ids that its matcher has accepted. For another text it takes back those that differ and
    accepts the rest, so a step costs one token, and a retraction or a rejected draft some more. A grammar
    that has once taken longer than MAX_MASK_SECONDS allows nothing any more, which ends its request."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._accepted: list[int] = []
        self._is_too_slow = False

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        mask = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)
        with self._time_limit(1):
            if not self._is_too_slow and self._go_to(output_ids):
                self._fill(mask, 0)
        return mask[0]

    def is_terminated(self, output_ids: Sequence[int]) -> bool:
        """It does not depend on time: all ranks answer alike."""
        with self._time_limit(1):
            return self._go_to(output_ids) and self._matcher.is_terminated()

    def next_tokens_at_nodes(
        self, output_ids: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], vocab_size: int
    ) -> torch.Tensor:
        """Depth first: accept a child, write its mask, go on below it, take it back."""
        masks = torch.zeros(len(token_ids), -(-vocab_size // 32), dtype=torch.int32)
        children: list[list[int]] = [[] for _ in token_ids]
        for node in range(1, len(token_ids)):
            children[parents[node]].append(node)

        def visit(node: int) -> None:
            self._fill(masks, node)
            for child in children[node]:
                if allows(masks[node], token_ids[child]) and self._matcher.accept_token(token_ids[child]):
                    visit(child)
                    self._matcher.rollback(1)

        with self._time_limit(len(token_ids)):
            if not self._is_too_slow and self._go_to(output_ids):
                visit(0)
        return masks

    @contextmanager
    def _time_limit(self, num_masks: int) -> Iterator[None]:
        start = time.thread_time()
        yield
        self._is_too_slow |= time.thread_time() - start > MAX_MASK_SECONDS * num_masks

    def _go_to(self, output_ids: Sequence[int]) -> bool:
        """Bring the matcher behind these ids; False when the grammar does not allow them."""
        known, num_known = self._accepted, len(self._accepted)
        if num_known and list(output_ids[:num_known]) != known:
            num_same = 0
            while num_same < min(num_known, len(output_ids)) and output_ids[num_same] == known[num_same]:
                num_same += 1
            self._matcher.rollback(num_known - num_same)
            del known[num_same:]
        for token_id in output_ids[len(known) :]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return False
            known.append(token_id)
        return True

    def _fill(self, masks: torch.Tensor, row: int) -> None:
        if not self._matcher.is_terminated() and not self._matcher.fill_next_token_bitmask(masks, row):
            masks[row] = -1
