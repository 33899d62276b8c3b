"""Data-parallel attention: tokens of all ranks are gathered, and each rank's experts compute all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.shared.interfaces import FusedExperts, TopKOutput
from diptych.shared.parallel.in_step import DispatchInStep, PassTokens


# --8<-- [start:choose-padding]
def pads_to_longest(tokens: PassTokens) -> bool:
    """True: MAX_LEN. Each rank pads its tokens to the largest number of any rank, and
    one all-gather collects them. It suits decode steps of similar sizes, whose shapes
    repeat. False: SUM_LEN. The tokens are concatenated without padding, by a sum over
    ranks of mostly zeros."""
    nums = tokens.num_tokens
    return not tokens.is_extend and 2 * sum(nums) >= max(nums) * len(nums)


# --8<-- [end:choose-padding]


class PassDispatch(DispatchInStep):
    """Expert dispatch with known numbers of tokens; call `begin` once for each forward pass."""

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        num_local = experts.w13.shape[0]
        # --8<-- [start:gather-and-scatter]
        all_x, weights = self._gather(x), self._gather(topk.topk_weights)
        ids = self._gather(topk.topk_ids + 1)
        local_ids = ids - 1 - self.part * num_local  # padding rows have the id -1, gathered as 0
        is_here = (ids > 0) & (local_ids >= 0) & (local_ids < num_local)
        summands = experts(all_x, TopKOutput(weights, torch.where(is_here, local_ids, -1)))
        return self._scatter(summands)
        # --8<-- [end:gather-and-scatter]

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, rank by rank; padding rows are 0."""
        tokens = self._tokens
        assert x.shape[0] == tokens.num_tokens[self.ranks.rank], f"{x.shape[0]} rows; the pass has {tokens}"
        if pads_to_longest(tokens):
            return self.ranks.all_gather(F.pad(x, (0, 0, 0, max(tokens.num_tokens) - x.shape[0])))
        return self.ranks.all_reduce(F.pad(x, (0, 0, self._start, sum(tokens.num_tokens) - self._end)))

    def _scatter(self, summands: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over ranks."""
        if pads_to_longest(self._tokens):
            return self.ranks.reduce_scatter(summands)[: self._end - self._start]
        return self.ranks.all_reduce(summands)[self._start : self._end]

    @property
    def _tokens(self) -> PassTokens:
        assert self.tokens is not None, "no forward pass has begun"
        return self.tokens

    @property
    def _start(self) -> int:
        return sum(self._tokens.num_tokens[: self.ranks.rank])

    @property
    def _end(self) -> int:
        return self._start + self._tokens.num_tokens[self.ranks.rank]
