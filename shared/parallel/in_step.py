"""Data-parallel attention: each rank computes attention for its own requests, and all ranks together compute
the experts for all tokens.

Every rank takes part in every forward pass. A rank without a batch runs an IDLE batch: its experts, for the
tokens of the others. Before a pass the ranks gather one small tensor, from which they make all decisions. How
tokens come to the experts is each panel's (`parallel/dp_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from diptych.shared.interfaces import (
    CausalLM,
    Collectives,
    FusedExperts,
    ModelRunner,
    MoE,
    Sampler,
    Scheduler,
    TopKOutput,
)
from diptych.shared.interfaces.expert_dispatch import ExpertDispatch
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.expert_parallel import ExpertParallel
from diptych.shared.parallel.grid import stages_of
from diptych.shared.parallel.survivors import Survivors
from diptych.shared.parallel.turns import Turns
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo

Half = Callable[[], Any]


def can_be_cut(batch: ForwardBatch) -> bool:
    """Whether a batch may run as two halves (`diptych.shared.modeling.two_batches`)."""
    given = batch.embeds, batch.custom_mask, batch.tree_mask, batch.num_kept
    is_verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
    return not is_verify and all(tensor is None for tensor in given)


@dataclass(frozen=True)
class PassTokens:
    """The facts about a forward pass that all ranks know."""

    num_tokens: tuple[int, ...]  # of each rank
    is_extend: bool  # whether a rank prefills
    num_nodes: tuple[int, ...] = (1,)  # of the requests of ranks that decode (1) or verify; distinct
    is_cut: bool = False  # into two halves that take turns

    def half(self, number: int) -> PassTokens:
        return replace(self, num_tokens=tuple((num + 1 - number) // 2 for num in self.num_tokens))


class DispatchInStep(ExpertDispatch):
    """Expert dispatch of ranks that begin each forward pass together."""

    def __init__(self, ranks: Collectives, ep: int) -> None:
        """A replica may have several ranks, which have the same tokens. Then tokens go among ranks with the
        same part, and the layer adds the outputs of the ranks of a replica, as it does without experts."""
        self.all_ranks = ranks
        self.experts: ExpertManager | None = None  # moves experts between passes
        self.survivors: Survivors | None = None  # with elastic_ep
        self.ranks = stages_of(ranks)
        self.part = ranks.rank * ep // ranks.size
        self.tokens: PassTokens | None = None
        self.two_batch_tokens: int | None = None
        """A pass with prompts is cut if a rank has so many tokens and every rank's batch can be cut."""

    def begin(
        self,
        num_tokens: int,
        is_extend: bool,
        device: torch.device,
        num_nodes: int = 1,
        can_be_cut: bool = False,
    ) -> PassTokens:
        """Begin a forward pass of all ranks on the device; 0 tokens: this rank has no batch. `num_nodes`: of
        each request, if the rank does not prefill. The numbers are gathered on the CPU, so that no rank waits
        for its device."""
        if self.experts is not None:
            self.experts.before_pass()
        # --8<-- [start:begin-a-pass]
        own = torch.tensor([[num_tokens, is_extend, num_nodes, can_be_cut]])
        nums, extends, nodes, cuts = zip(*self.ranks.all_gather(own).tolist())
        kinds = {n for num, extend, n in zip(nums, extends, nodes) if num > 0 and not extend}
        is_cut = self.two_batch_tokens is not None and max(nums) >= self.two_batch_tokens
        is_cut = is_cut and any(extends) and all(cuts)
        self.tokens = PassTokens(nums, any(extends), tuple(sorted(kinds)), is_cut)
        # --8<-- [end:begin-a-pass]
        return self.tokens

    # --8<-- [start:halves-in-step]
    def in_turns(self, first: Half, second: Half, device: torch.device) -> list[Any]:
        """Run the halves of a pass that is cut; the one that runs finds its tokens."""
        whole, turns = self.tokens, Turns()
        assert whole is not None

        def pass_on() -> None:
            own = self.tokens
            turns.pass_on()
            self.tokens = own

        def half(number: int, function: Half) -> Any:
            self.tokens = whole.half(number)
            return function()

        self.ranks.meanwhile = pass_on
        try:
            return turns.run(partial(half, 0, first), partial(half, 1, second), device)
        finally:
            self.ranks.meanwhile, self.tokens = None, whole

    # --8<-- [end:halves-in-step]

    @property
    def is_cut(self) -> bool:
        return self.tokens is not None and self.tokens.is_cut

    def have_regrouped(self) -> None:
        """The group has other ranks from now on, each with a part of the experts."""
        self.part = self.all_ranks.rank

    def to_the_end(self, run: Half, take_part: Half, num_passes: int) -> Any:
        """Run pass number `num_passes`, again if a rank dies in it and the others go on. `take_part`: run the
        experts of this rank while others repeat it."""
        return run() if self.survivors is None else self.survivors.to_the_end(run, take_part, num_passes)

    def take_part(self, model: CausalLM) -> None:
        """Run the experts of this rank in a forward pass in which it has no tokens."""
        like = next(model.parameters())
        assert model.config.moe is not None
        no_tokens = like.new_empty(0, model.config.hidden_size)
        weights = like.new_empty(0, model.config.moe.num_experts_per_tok, dtype=torch.float32)
        for module in model.modules():
            if isinstance(module, MoE):
                self.run(no_tokens, TopKOutput(weights, weights.int()), module.experts)

    def without_padding(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """The ids of this rank's tokens; -1 in rows that only pad the pass."""
        return topk_ids

    def runner_in_step(self, runner: type[ModelRunner]) -> type[ModelRunner]:
        """A model runner that begins each pass here; `num_passes` counts passes."""
        return in_lockstep(runner, self)


class ExpertsInStep(ExpertParallel):
    """The experts of one layer, each of which may be on several ranks and may move."""

    dispatch: DispatchInStep

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        """topk: logical experts. Each rank begins with another place of an expert, so that ranks with one
        token each do not all use its first place."""
        ids = self.placement.choose(self.dispatch.without_padding(topk.topk_ids), self.dispatch.ranks.rank)
        return self.dispatch.run(x, topk._replace(topk_ids=ids), experts)


def in_lockstep(runner: type[ModelRunner], dispatch: DispatchInStep) -> type[Any]:
    """A model runner that runs each pass together with all ranks."""

    class LockstepRunner(runner):  # type: ignore[misc, valid-type]
        in_step = dispatch
        num_passes = 0
        _is_inside = False

        def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
            return self._pass(super().forward, forward_batch)

        def forward_and_sample(
            self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
        ) -> tuple[LogitsOutput, SampleOutput]:
            return self._pass(super().forward_and_sample, forward_batch, sampler, info, num_token_ids)

        def run_idle_pass(self, scheduler: Scheduler) -> None:
            """Take part in a pass without a batch of the scheduler."""
            self.forward(idle_batch(self.kv_pool.device))

        @torch.inference_mode()
        def _pass(self, function: Any, batch: ForwardBatch, *args: Any) -> Any:
            if self._is_inside:  # forward_and_sample may call forward
                return function(batch, *args)
            self.num_passes, self._is_inside = self.num_passes + 1, True
            run = partial(self._together, partial(function, batch, *args), batch)
            result = dispatch.to_the_end(run, self._take_part_alone, self.num_passes)
            self._is_inside = False  # after an error it stays set: the ranks are out of step
            return result

        def _together(self, run: Half, batch: ForwardBatch) -> Any:
            """Run a pass that all ranks begin."""
            device, is_extend = batch.input_ids.device, batch.forward_mode.is_prefill
            num_tokens, num_nodes = batch.num_tokens, batch.num_tokens // max(batch.batch_size, 1)
            tokens = dispatch.begin(num_tokens, is_extend, device, num_nodes, can_be_cut(batch))
            if batch.forward_mode is ForwardMode.IDLE and sum(tokens.num_tokens) > 0:
                self._take_part(batch)
            return run()

        def _take_part(self, batch: ForwardBatch) -> None:
            """Run the experts of an IDLE rank in a forward pass."""
            take_part = partial(dispatch.take_part, self.model)
            if dispatch.is_cut:
                dispatch.in_turns(take_part, take_part, batch.input_ids.device)
            else:
                take_part()

        @property
        def is_in_step(self) -> bool:
            return not self._is_inside

        @torch.inference_mode()
        def regroup(self) -> None:
            """Between two passes: go on with the ranks that are left."""
            dispatch.survivors.catch_up(self._take_part_alone, self.num_passes)  # type: ignore[union-attr]

        def _take_part_alone(self) -> None:
            self._together(lambda: None, idle_batch(self.kv_pool.device))

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
