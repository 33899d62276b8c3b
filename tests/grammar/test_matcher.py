"""Masks depend on the text alone, whatever was asked before; and planted bugs of the matcher are caught."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from diptych.shared.grammar import matcher as module
from diptych.shared.grammar.matcher import BaseGrammar, MatcherGrammar, allows
from diptych.shared.grammar.reasoning import ReasoningGrammar
from diptych.shared.interfaces.grammar import Grammar
from diptych.shared.tools.conformance.oracles.brackets import CLOSE, END, OPEN, BracketMatcher
from tests.planted import Bug, Bugs

VOCAB_SIZE = 70


class Plain(BaseGrammar):
    """Asks a new matcher each time."""

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        matcher, mask = BracketMatcher(), torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)
        if all(map(matcher.accept_token, output_ids)) and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask, 0)
        return mask[0]

    def is_terminated(self, output_ids: Sequence[int]) -> bool:
        matcher = BracketMatcher()
        return all(map(matcher.accept_token, output_ids)) and matcher.is_terminated()


def choose(rng: random.Random, mask: torch.Tensor) -> int:
    allowed = [i for i in range(VOCAB_SIZE) if allows(mask, i)]
    return rng.choice(allowed) if allowed and rng.random() < 0.9 else rng.randrange(VOCAB_SIZE)


def check_walk(grammar: Grammar, plain: Grammar, seed: int) -> None:
    """Texts grow, lose their ends, and change in the middle; trees are drafted behind them."""
    rng, text = random.Random(seed), []
    for _ in range(60):
        mask = plain.next_tokens(text, VOCAB_SIZE)
        assert torch.equal(grammar.next_tokens(text, VOCAB_SIZE), mask), text
        assert grammar.is_terminated(text) == plain.is_terminated(text), text
        if text and rng.random() < 0.5:
            token_ids, parents = [text[-1]], [-1]
            masks = [mask]
            for node in range(1, 12):
                parents.append(rng.randrange(node))
                token_ids.append(choose(rng, masks[parents[node]]))
                way, at = [], node
                while at > 0:
                    way, at = [token_ids[at], *way], parents[at]
                behind = plain.next_tokens(text + way, VOCAB_SIZE)
                masks.append(behind * allows(masks[parents[node]], token_ids[node]))
            found = grammar.next_tokens_at_nodes(text, token_ids, parents, VOCAB_SIZE)
            assert torch.equal(found, torch.stack(masks)), (text, token_ids, parents)
        action = rng.random()
        if action < 0.15:
            text = text[: rng.randrange(len(text) + 1)]
        elif action < 0.2:
            text = text[: len(text) // 2] + [choose(rng, mask) for _ in range(2)]
        else:
            text = [*text, choose(rng, mask)]


@pytest.mark.parametrize("seed", range(20))
def test_a_walk(seed: int) -> None:
    check_walk(MatcherGrammar(BracketMatcher()), Plain(), seed)


@pytest.mark.parametrize("end", [[61], [61, 62]])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_walk_behind_a_reasoning_block(seed: int, is_open: bool, end: list[int]) -> None:
    def behind(inner: Grammar) -> Grammar:
        return ReasoningGrammar(inner, None if is_open else 60, end, frozenset([END]))

    check_walk(behind(MatcherGrammar(BracketMatcher())), behind(Plain()), seed)


# ---- planted bugs ----


class RollsBackOneTooFew(MatcherGrammar):
    """One token too few of a text that differs is taken back."""

    def _go_to(self, output_ids: Sequence[int]) -> bool:
        known = self._accepted
        same = next((i for i, (a, b) in enumerate(zip(known, output_ids)) if a != b), len(output_ids))
        if same < len(known):
            self._matcher.rollback(max(len(known) - same - 1, 0))
            del known[same:]
        for token_id in output_ids[len(known) :]:
            if not self._matcher.accept_token(token_id):
                return False
            known.append(token_id)
        return True


class MaskOneStepLate(MatcherGrammar):
    """The mask is that before the last token."""

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        return super().next_tokens(output_ids[:-1], vocab_size)


class KeepsTheBranch(MatcherGrammar):
    """A child is not taken back before its sibling is tried."""

    def next_tokens_at_nodes(
        self, output_ids: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], vocab_size: int
    ) -> torch.Tensor:
        rollback, self._matcher.rollback = self._matcher.rollback, lambda n: None  # type: ignore[method-assign]
        try:
            return super().next_tokens_at_nodes(output_ids, token_ids, parents, vocab_size)
        finally:
            self._matcher.rollback = rollback  # type: ignore[method-assign]


class MaskOfTheParent(MatcherGrammar):
    """A node gets the mask of its parent."""

    def next_tokens_at_nodes(
        self, output_ids: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], vocab_size: int
    ) -> torch.Tensor:
        masks = super().next_tokens_at_nodes(output_ids, token_ids, parents, vocab_size)
        return masks[[max(parent, 0) for parent in parents]]


class ForgetsARefusal(MatcherGrammar):
    """A token that is not allowed counts as accepted."""

    def _go_to(self, output_ids: Sequence[int]) -> bool:
        return super()._go_to(output_ids) or True


class NeverEnds(MatcherGrammar):
    """A complete text is not the end."""

    def is_terminated(self, output_ids: Sequence[int]) -> bool:
        return False


BUGS = Bugs("matcher", "MatcherGrammar", "check_walk")
BUGS.add_all(RollsBackOneTooFew, MaskOneStepLate, KeepsTheBranch, MaskOfTheParent, ForgetsARefusal, NeverEnds)


@BUGS.found_by(AssertionError, IndexError)
def test_a_planted_bug_is_caught(bug: Bug) -> None:
    for seed in range(20):
        check_walk(bug.plant(BracketMatcher()), Plain(), seed)


def test_a_slow_grammar_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = MatcherGrammar(BracketMatcher())
    assert grammar.next_tokens([], VOCAB_SIZE).any()
    monkeypatch.setattr(module, "MAX_MASK_SECONDS", 0.0)
    grammar.next_tokens([OPEN], VOCAB_SIZE)
    assert not grammar.next_tokens([OPEN], VOCAB_SIZE).any()


def test_time_of_the_end_counts_and_does_not_decide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = MatcherGrammar(BracketMatcher())
    monkeypatch.setattr(module, "MAX_MASK_SECONDS", 0.0)
    text: list[int] = []
    for token_id, is_over in ((OPEN, False), (CLOSE, False), (END, True)):
        text.append(token_id)
        assert grammar.is_terminated(text) == is_over
    assert not grammar.next_tokens([], VOCAB_SIZE).any()


def test_where_a_reasoning_block_ends() -> None:
    grammar = ReasoningGrammar(MatcherGrammar(BracketMatcher()), 60, [61, 62], frozenset([END]))
    assert grammar._start([]) == grammar._start([OPEN, 61, 62]) == 0
    assert grammar._start([60, 61, 61]) is None
    assert grammar._start([60, 61, 61, 62, OPEN]) == 4
