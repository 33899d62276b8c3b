"""Draws: frequencies of token ids are compared with probabilities, within what chance allows."""

from __future__ import annotations

import math
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance

NUM_DRAWS = 20_000
SIGMAS = 5.5
"""A right function fails at one token in 10 million."""

DRAWS = "a frequency of draws differs from its probability by chance; what cannot be drawn never is"
FEW_DRAWS = Tolerance(1.0, 0.0, math.inf, "frequencies of few draws say nothing: such sizes are timed only")


def limit_of_draws(probs: torch.Tensor, num_draws: int) -> Tolerance:
    """The tolerance of frequencies among `num_draws` draws of each row of probs [num_rows, vocab_size]: an
    impossible token must not be drawn once."""
    if num_draws < NUM_DRAWS:
        return FEW_DRAWS
    smallest = float(probs[probs > 0].min())
    norms = probs.norm(dim=-1)
    spread = float(((1 - norms.square()).clamp(min=0) / num_draws).sqrt().div(norms).max())
    rtol = SIGMAS / math.sqrt(smallest * num_draws)
    return Tolerance(0.5 / num_draws, rtol, SIGMAS * spread + 1e-9, DRAWS)


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
    if len(outside):
        raise Mismatch("a token id", f"0 to {vocab_size - 1}", int(outside[0]))
    return (ids.long().bincount(minlength=vocab_size) / max(len(ids), 1)).float()
