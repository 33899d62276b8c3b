"""Compares two models of one vocabulary on the next tokens of a text: KL divergence, best tokens,
perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

NUM_TOP = 5


class TokenRow(NamedTuple):
    """A token that A or B has among its best."""

    token_id: int
    a: float  # probability
    b: float


@dataclass(frozen=True)
class Choice:
    """The two models' predictions of the token behind `position` of one text."""

    text: int  # number of the prompt, from 0
    position: int
    is_answer: bool  # the next token is one of A's answer, not of the prompt
    next_id: int  # the text's own next token
    kl: float  # of B's distribution from A's, in nats
    best: tuple[int, int]  # A's, B's
    logprobs: tuple[float, float]  # of next_id
    top: tuple[TokenRow, ...]  # by A's probability

    @property
    def same_best(self) -> bool:
        return self.best[0] == self.best[1]


@dataclass
class TokenErrors:
    """Errors over all positions of all texts; logprobs are of each text's own next token."""

    choices: list[Choice] = field(default_factory=list)

    def add(self, choices: Sequence[Choice]) -> None:
        self.choices += choices

    @property
    def mean_kl(self) -> float:
        return sum(choice.kl for choice in self.choices) / max(len(self.choices), 1)

    @property
    def largest(self) -> Choice | None:
        """Where the KL divergence is largest."""
        return max(self.choices, key=lambda choice: choice.kl, default=None)

    @property
    def same_best(self) -> float:
        """Share of the positions at which both have the same best token."""
        return sum(choice.same_best for choice in self.choices) / max(len(self.choices), 1)

    @property
    def first_other(self) -> Choice | None:
        """The first position of A's answers at which the best tokens differ; otherwise the first of the
        prompts."""
        others = [choice for choice in self.choices if not choice.same_best]
        return min(others, key=lambda c: (not c.is_answer, c.text, c.position), default=None)

    @property
    def perplexity(self) -> tuple[float, float]:
        """A's and B's: exp of the mean negative log-probability of the texts."""
        count = max(len(self.choices), 1)
        return (
            math.exp(-sum(choice.logprobs[0] for choice in self.choices) / count),
            math.exp(-sum(choice.logprobs[1] for choice in self.choices) / count),
        )


def compare_logits(
    a: torch.Tensor, b: torch.Tensor, ids: Sequence[int], text: int, num_prompt_tokens: int
) -> list[Choice]:
    """a, b [len(ids), vocab_size]: logits after each token of a text -> one Choice for every position but the
    last."""
    found = []
    for position in range(len(ids) - 1):
        next_id = ids[position + 1]
        log_a, log_b = (x[position].double().log_softmax(0) for x in (a, b))
        p_a, p_b = log_a.exp(), log_b.exp()
        kl = float(torch.where(p_a > 0, p_a * (log_a - log_b), 0.0).sum())
        num_top = min(NUM_TOP, len(log_a))
        tops = dict.fromkeys(i for x in (log_a, log_b) for i in x.topk(num_top).indices.tolist())
        rows = [TokenRow(i, float(p_a[i]), float(p_b[i])) for i in tops]
        found.append(
            Choice(
                text=text,
                position=position,
                is_answer=position + 1 >= num_prompt_tokens,
                next_id=next_id,
                kl=max(kl, 0.0),  # terms of both signs: rounding may leave the sum just below zero
                best=(int(log_a.argmax()), int(log_b.argmax())),
                logprobs=(float(log_a[next_id]), float(log_b[next_id])),
                top=tuple(sorted(rows, key=lambda row: -row.a)),
            )
        )
    return found
