"""The residual stream of a model whose blocks leave their sum to the next norm."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.shared.interfaces.collectives import Collectives


class PartialSums(NamedTuple):
    """The result of a split-K GEMM that is not added up yet."""

    parts: torch.Tensor  # float32 [parts, num_tokens, hidden_size]


class RankPart(NamedTuple):
    """This rank's summand of a sum over ranks that is not computed yet."""

    part: torch.Tensor
    tp: Collectives

    def sum(self) -> torch.Tensor:
        return self.tp.all_reduce(self.part)


Pending = torch.Tensor | PartialSums | RankPart | None


class Stream(NamedTuple):
    """The residual stream between two blocks: residual + pending.

    pending: the result of the last block if the next norm adds it, in one kernel where it can: a tensor like
    residual (from an MoE), partial sums, or this rank's part. None: it has been added.
    """

    residual: torch.Tensor  # [num_tokens, hidden_size]
    pending: Pending = None

    def total(self) -> torch.Tensor:
        """residual + pending; the residual itself if nothing is pending."""
        residual, pending = self
        if pending is None:
            return residual
        if isinstance(pending, PartialSums):
            return (pending.parts.sum(0) + residual).to(residual.dtype)
        return (pending.sum() if isinstance(pending, RankPart) else pending) + residual

    def copied_total(self) -> torch.Tensor:
        """The total in a tensor of its own."""
        return self.residual.clone() if self.pending is None else self.total()
