"""Data-parallel attention: each rank computes attention for its own requests, and all ranks together compute
the experts for all tokens.

Every rank takes part in every forward pass. A rank without a batch runs an IDLE batch: its experts, for the
tokens of the others. Before a pass the ranks gather one small tensor, from which they make all decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from diptych.shared.interfaces import Collectives, FusedExperts, ModelRunner, MoE, Sampler, TopKOutput
from diptych.shared.interfaces.expert_dispatch import ExpertDispatch
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo


@dataclass(frozen=True)
class PassTokens:
    """The facts about a forward pass that all ranks know."""

    num_tokens: tuple[int, ...]  # of each rank
    is_extend: bool  # whether a rank prefills

    # --8<-- [start:choose-padding]
    @property
    def pads_to_longest(self) -> bool:
        """True: MAX_LEN. Each rank pads its tokens to the largest number of any rank,
        and one all-gather collects them. It suits decode steps of similar sizes, whose
        shapes repeat. False: SUM_LEN. The tokens are concatenated without padding, by a
        sum over ranks of mostly zeros."""
        return not self.is_extend and 2 * sum(self.num_tokens) >= max(self.num_tokens) * len(self.num_tokens)

    # --8<-- [end:choose-padding]


class PassDispatch(ExpertDispatch):
    """Expert dispatch with known numbers of tokens; call `begin` once for each forward pass."""

    def __init__(self, ranks: Collectives, ep: int) -> None:
        self.ranks = ranks
        self.part = ranks.rank * ep // ranks.size
        self.tokens: PassTokens | None = None

    def begin(self, num_tokens: int, is_extend: bool, device: torch.device) -> PassTokens:
        """Begin a forward pass of all ranks; 0 tokens: this rank has no batch."""
        own = torch.tensor([[num_tokens, is_extend]], device=device)
        each = self.ranks.all_gather(own).tolist()
        self.tokens = PassTokens(tuple(num for num, _ in each), any(extends for _, extends in each))
        return self.tokens

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
        if tokens.pads_to_longest:
            return self.ranks.all_gather(F.pad(x, (0, 0, 0, max(tokens.num_tokens) - x.shape[0])))
        return self.ranks.all_reduce(F.pad(x, (0, 0, self._start, sum(tokens.num_tokens) - self._end)))

    def _scatter(self, summands: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over ranks."""
        if self._tokens.pads_to_longest:
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


def in_lockstep(runner: type[ModelRunner], dispatch: PassDispatch) -> type[ModelRunner]:
    """A model runner that runs each pass together with all ranks; `num_passes` counts passes."""

    class LockstepRunner(runner):  # type: ignore[misc, valid-type]
        num_passes = 0
        _is_inside = False

        def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
            return self._pass(super().forward, forward_batch)

        def forward_and_sample(
            self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
        ) -> tuple[LogitsOutput, SampleOutput]:
            return self._pass(super().forward_and_sample, forward_batch, sampler, info, num_token_ids)

        @torch.inference_mode()
        def _pass(self, function: Any, batch: ForwardBatch, *args: Any) -> Any:
            if self._is_inside:  # forward_and_sample may call forward
                return function(batch, *args)
            self.num_passes += 1
            self._is_inside = True
            device, is_extend = batch.input_ids.device, batch.forward_mode.is_prefill
            tokens = dispatch.begin(len(batch.input_ids), is_extend, device)
            if batch.forward_mode is ForwardMode.IDLE and sum(tokens.num_tokens) > 0:
                self._run_experts()
            result = function(batch, *args)
            self._is_inside = False  # after an error it stays set: the ranks are out of step
            return result

        def _run_experts(self) -> None:
            """Run the experts of an IDLE rank in a forward pass."""
            like = next(self.model.parameters())
            no_tokens = like.new_empty(0, self.model.config.hidden_size)
            for module in self.model.modules():
                if isinstance(module, MoE):
                    module(no_tokens)

        @property
        def is_in_step(self) -> bool:
            return not self._is_inside

    return LockstepRunner


def idle_batch(device: torch.device) -> ForwardBatch:
    """A batch without tokens."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.IDLE,
        input_ids=nothing,
        positions=nothing,
        req_pool_indices=nothing,
        seq_lens=nothing,
        out_cache_loc=nothing,
        extend_seq_lens=nothing,
        extend_start_loc=nothing,
        seq_lens_cpu=(),
        extend_seq_lens_cpu=(),
    )
