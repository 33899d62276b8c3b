"""Data-parallel attention where CUDA graphs contain the decode steps of all ranks, IDLE ones too.

Differs from reference: if no rank prefills, every rank runs a decode or a verify step padded to the same
number of rows, which follows from the largest number of tokens of any rank (MAX_LEN). A layer has one
all-gather, of rows that hold a token, its experts and their weights, and one reduce-scatter. `counts` marks
padding rows on the device, so a graph serves any numbers. Other passes (SUM_LEN) run eagerly, with uneven
rows by all-to-all. Loses where one rank has most of the requests: the others compute padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from diptych.optimized.graphs.cuda_graph import graphs_of_runner
from diptych.optimized.kernels.moe.gathered_experts import gathered_experts
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import Collectives, FusedExperts, ModelRunner, Sampler, TopKOutput
from diptych.shared.parallel.in_step import DispatchInStep, PassTokens, idle_batch, in_lockstep
from diptych.shared.to_device import to_device
from diptych.shared.types import ForwardBatch

ALIGNMENT = 16
"""Words of 4 bytes of a gathered row: every row starts as aligned as the first."""


def find_by_torch(
    weights: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor | None, first: int, num_local: int
) -> TopKOutput:
    """`gathered_experts` without Triton."""
    local = ids - first
    is_here = (ids >= 0) & (local >= 0) & (local < num_local)
    if counts is not None:
        rows = torch.arange(ids.shape[0] // counts.shape[0], device=ids.device)
        is_here &= (rows < counts[:, None]).view(-1, 1)
    return TopKOutput(torch.where(is_here, weights, 0.0), torch.where(is_here, local, -1))


class PassDispatch(DispatchInStep):
    def __init__(self, ranks: Collectives, ep: int) -> None:
        super().__init__(ranks, ep)
        self.captured: dict[int, set[int]] = {}  # rows of the steps with each number of nodes of a request
        self.num_rows: int | None = 0  # of each rank, as in a capture; None: not padded
        self._counts: torch.Tensor | None = None

    # --8<-- [start:choose-padding]
    def begin(self, num_tokens: int, is_extend: bool, device: torch.device, *more: Any) -> PassTokens:
        tokens = super().begin(num_tokens, is_extend, device, *more)
        self.num_rows = None if tokens.is_extend else self._smallest_of_all(tokens)
        self.counts(device).copy_(to_device(tokens.num_tokens, torch.int64, device))
        return tokens

    def _smallest_of_all(self, tokens: PassTokens) -> int | None:
        """Ranks that decode and ranks that verify need a number of rows that is
        captured for both."""
        captured = [self.captured.get(n, set()) for n in tokens.num_nodes or (1,)]
        most, rows = max(tokens.num_tokens), set.intersection(*captured)
        return min((num for num in rows if num >= most), default=None)

    # --8<-- [end:choose-padding]

    def have_regrouped(self) -> None:
        super().have_regrouped()
        self._counts = None  # of another number of ranks

    @property
    def is_padded(self) -> bool:
        return self.num_rows is not None

    def counts(self, device: torch.device) -> torch.Tensor:
        """The number of tokens of each rank, int64, always at the same address: graphs read it."""
        if self._counts is None:
            self._counts = torch.zeros(self.ranks.size, dtype=torch.int64, device=device)
        return self._counts

    def without_padding(self, topk_ids: torch.Tensor) -> torch.Tensor:
        if not self.is_padded:
            return topk_ids
        rows = torch.arange(topk_ids.shape[0], device=topk_ids.device)
        is_token = rows < self.counts(topk_ids.device)[self.ranks.rank]
        return torch.where(is_token[:, None], topk_ids, -1)

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        num_local = experts.w13.shape[0]
        # --8<-- [start:gather-and-scatter]
        parts = (x.contiguous(), topk.topk_weights.contiguous(), topk.topk_ids.contiguous())
        words = [part.view(torch.int32) for part in parts]
        widths = [each.shape[1] for each in words]
        filler = words[0][:, : -sum(widths) % ALIGNMENT]
        gathered = self._gather(torch.cat([*words, filler], dim=1)).split([*widths, filler.shape[1]], dim=1)
        all_x, weights, ids = (each.view(part.dtype) for each, part in zip(gathered, parts))
        counts = self.counts(x.device) if self.is_padded else None
        find = gathered_experts if x.is_cuda else find_by_torch
        here = find(weights, ids, counts, self.part * num_local, num_local)
        return self._scatter(experts(all_x, here), x.shape[0])
        # --8<-- [end:gather-and-scatter]

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, rank by rank."""
        if self.is_padded:
            return self.ranks.all_gather(x)
        num_own, size = x.shape[0], self.ranks.size
        assert num_own == self._nums[self.ranks.rank], f"{num_own} rows; the pass has {self.tokens}"
        return self.ranks.all_to_all(x.repeat(size, 1), [num_own] * size, self._nums)

    def _scatter(self, summands: torch.Tensor, num_own: int) -> torch.Tensor:
        """This rank's rows of the sum over ranks."""
        if self.is_padded:
            return self.ranks.reduce_scatter(summands)
        size = self.ranks.size
        own = self.ranks.all_to_all(summands, self._nums, [num_own] * size)
        wide = torch.promote_types(own.dtype, torch.float32)
        return own.unflatten(0, (size, num_own)).sum(0, dtype=wide).to(own.dtype)

    @property
    def _nums(self) -> tuple[int, ...]:
        assert self.tokens is not None, "no forward pass has begun"
        return self.tokens.num_tokens

    def runner_in_step(self, runner: type[ModelRunner]) -> type[ModelRunner]:
        dispatch = self

        class PaddedRunner(in_lockstep(runner, dispatch)):  # type: ignore[misc]
            """Whether a padded step is replayed or launched kernel by kernel is this rank's matter: the
            collectives are the same."""

            make_graphs = staticmethod(partial(graphs_of_runner, ranks=dispatch.all_ranks))

            def prepare(self, config: EngineConfig, sampler: Sampler, num_token_ids: int) -> None:
                super().prepare(config, sampler, num_token_ids)
                steps = (self.steps.decode, *self.steps.verify)
                self.by_nodes = {each.buffers.num_nodes: each for each in steps}
                dispatch.captured = {
                    n: {n * bs for bs in each.batch_sizes} for n, each in self.by_nodes.items()
                }

            def _steps_for(self, forward_batch: ForwardBatch) -> Any:
                tokens, num_rows = dispatch.tokens, dispatch.num_rows
                if tokens is None or num_rows is None:
                    return None
                num_nodes = max(tokens.num_nodes)  # of an IDLE rank: every number of nodes has this size
                if forward_batch.batch_size > 0:
                    num_nodes = forward_batch.num_tokens // forward_batch.batch_size
                self.by_nodes[num_nodes].min_rows = num_rows // num_nodes
                return self.by_nodes[num_nodes]

            def _take_part(self, batch: ForwardBatch) -> None:
                steps = self._steps_for(batch)
                if steps is None:
                    super()._take_part(batch)
                else:
                    steps.run(batch, self.capture_hidden, replay=not self.is_watched)

            def _reads_last_rows(self, forward_batch: ForwardBatch) -> bool:
                return False  # the last layer's experts get the tokens that all ranks know of

            def run_idle_pass(self, scheduler: Any) -> None:
                """On the stream of the scheduler's batches, behind them."""
                batch = idle_batch(self.kv_pool.device)
                scheduler.pipeline.streams.launch(lambda: self.forward(batch).next_token_logits)

        return PaddedRunner
