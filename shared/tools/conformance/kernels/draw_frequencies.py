"""Draws: frequencies of token ids are compared with probabilities, within what chance allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.poison import INT_POISON
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance

NUM_DRAWS = 20_000
FEWEST_DRAWS = 200
SIGMAS = 5.5
"""A right function fails at one token in 10 million."""

FEW_DRAWS = "frequencies of few draws are not compared; what cannot be drawn never is"
DRAWS = "a frequency of draws differs from its probability by chance; what cannot be drawn never is"
RARE = 8
"""Draws beyond the normal distribution's limit: those of a rare token have a longer tail."""


@dataclass(frozen=True)
class DrawTolerance(Tolerance):
    """The limit of frequencies among `num_draws` draws. A token of probability 0 must not be drawn once; of
    few draws nothing else is required."""

    num_draws: float = 0.0

    def allowed(self, expected: torch.Tensor) -> torch.Tensor:
        n = self.num_draws
        limit = SIGMAS * (expected * (1 - expected).clamp(min=0) / n).sqrt() + RARE / n
        if n < FEWEST_DRAWS:
            limit = torch.full_like(expected, torch.inf)
        return torch.where(expected > 0, limit, 0.5 / n)

    def __str__(self) -> str:
        return f"{SIGMAS:g} standard deviations of {self.num_draws:.0f} draws"


def limit_of_draws(probs: torch.Tensor, num_draws: int) -> Tolerance:
    """The tolerance of frequencies among `num_draws` draws of each row of probs [num_rows, vocab_size]."""
    if num_draws < FEWEST_DRAWS:
        return DrawTolerance(0.0, 0.0, math.inf, FEW_DRAWS, 1.0)
    norms = probs.norm(dim=-1)
    mean = (1 - norms.square()).clamp(min=0)  # of the squared norm of the error, times num_draws
    deviation = (2 * probs.pow(2).sum(-1)).sqrt()
    largest = torch.minimum(SIGMAS**2 * mean, mean + 3 * SIGMAS * deviation)
    spread = float((largest / num_draws).sqrt().div(norms).max())
    return DrawTolerance(0.0, 0.0, spread + 1e-3, DRAWS, float(num_draws))


def expect_ids(ids: Any, *shapes: tuple[int, ...]) -> torch.Tensor:
    """The ids. Raises `Mismatch` unless they are an int32 or int64 tensor of one of the shapes."""
    if not isinstance(ids, torch.Tensor):
        raise Mismatch("ids", "a tensor", type(ids).__name__)
    if ids.dtype not in (torch.int32, torch.int64):
        raise Mismatch("dtype of ids", "int32 or int64", str(ids.dtype).removeprefix("torch."))
    if ids.shape not in shapes:
        raise Mismatch("shape of ids", " or ".join(str(list(each)) for each in shapes), list(ids.shape))
    return ids


def frequency(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32 [vocab_size]. Raises `Mismatch` for an id outside of the vocabulary."""
    ids = ids.flatten()
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside) and int(outside[0]) in (INT_POISON, torch.iinfo(ids.dtype).max):
        raise Mismatch("elements of ids are not written")
    if len(outside):
        raise Mismatch("a token id", f"0 to {vocab_size - 1}", int(outside[0]))
    return (ids.long().bincount(minlength=vocab_size) / max(len(ids), 1)).float()
