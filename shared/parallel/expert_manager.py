"""Moves experts between ranks while the engine runs: to balance their load, and after a loss.

All ranks call the same methods between the same forward passes and compute the same maps. A rank's sends and
receives follow from the old and the new map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diptych.shared.interfaces import (
    CausalLM,
    Collectives,
    ExpertBalancer,
    ExpertDispatch,
    ExpertMap,
    FusedExperts,
    MoE,
)
from diptych.shared.parallel.expert_map import ExpertPlacement, map_of
from diptych.shared.parallel.expert_parallel import ExpertParallel, ExpertsLost


class ExpertManager:
    """Gives every MoE of the model its `expert_parallel`, and wraps the model's `forward`. The model runner,
    or the dispatch of ranks in step, calls `before_pass`. `interval`: forward passes between two rebalances;
    None: no rebalancing. `reload`: reads the experts of a placement that this rank has (-1: none) from the
    checkpoint into the model, and returns the number of tensors."""

    def __init__(
        self,
        model: CausalLM,
        dispatch: ExpertDispatch,
        ranks: Collectives,
        ep: int,
        experts: ExpertMap,
        balancer: ExpertBalancer,
        interval: int | None,
        reload: Callable[[ExpertMap], int],
        kind: type[ExpertParallel] = ExpertParallel,
    ) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, MoE)]
        device = next(model.parameters()).device
        self.placements = [ExpertPlacement(experts, i, device) for i in range(len(self.layers))]
        self.parallel = [kind(dispatch, placement) for placement in self.placements]
        for moe, parallel in zip(self.layers, self.parallel):
            moe.expert_parallel = parallel
        self.ranks = ranks
        self.ep = ep
        self.experts = experts
        self.balancer = balancer
        self.interval = interval
        self.reload = reload
        self.live = list(range(ep))  # parts
        self.num_passes = 0
        self.num_moved = 0  # experts that this rank got from others
        self.num_reloaded = 0  # tensors that it read again
        self._forward: Callable[..., torch.Tensor] = model.forward
        model.forward = self.forward  # type: ignore[method-assign]

    def before_pass(self) -> None:
        """Rebalance when it is time. CUDA graphs remain valid: weights and maps are overwritten in place."""
        if self.num_passes == 0:
            self._forget_load()  # of warming up
        self.num_passes += 1
        if self.interval is not None and self.num_passes % self.interval == 0:
            self.rebalance()

    # --8<-- [start:rerun-the-step]
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        while True:
            try:
                return self._forward(*args, **kwargs)
            except ExpertsLost as lost:  # the repeated pass overwrites what the failed pass has written
                self.live.remove(lost.part)
                self.rebalance()

    # --8<-- [end:rerun-the-step]

    def lose(self, part: int, layer: int) -> None:
        """For tests: lose the experts of a part in the next forward pass, when it reaches a layer."""
        if self.ranks.rank * self.ep // self.ranks.size == part:
            for moe in self.layers:
                for parameter in moe.experts.parameters():
                    parameter.data.view(torch.uint8).fill_(255)  # NaN in every type of float
        self.parallel[layer].lost_part = part

    def rebalance(self) -> None:
        """Place the experts on the live parts according to the load since the last call."""
        load = torch.stack([each.load for each in self.placements]).cpu()
        self.move(self._balanced(self.ranks.all_reduce(load)))  # the same on all ranks
        self._forget_load()

    def _forget_load(self) -> None:
        for each in self.placements:
            each.load.zero_()

    def _balanced(self, load: torch.Tensor) -> ExpertMap:
        num_logical, old = load.shape[1], self.experts.physical_to_logical
        num_local = old.shape[1] // self.ep
        num_physical = num_local * len(self.live)
        if num_physical < num_logical:
            raise RuntimeError(
                f"{len(self.live)} of {self.ep} parts of {num_local} experts have no room for {num_logical}"
            )
        placed = self.balancer.balance(load, num_physical, len(self.live)).physical_to_logical
        rows = torch.full_like(old, -1).unflatten(1, (self.ep, num_local))
        rows[:, self.live] = placed.unflatten(1, (len(self.live), num_local))
        return map_of(rows.flatten(1), num_logical)

    def move(self, experts: ExpertMap) -> None:
        """Move the weights to their new places, from the nearest live replica or from the checkpoint."""
        missing = torch.full_like(experts.physical_to_logical, -1)
        for i, moe in enumerate(self.layers):
            old, new = (
                each.physical_to_logical[i].view(self.ep, -1).tolist() for each in (self.experts, experts)
            )
            missing[i] = torch.tensor(self._move_layer(moe.experts, old, new)).flatten()
            self.placements[i].use(experts)
        if bool((missing >= 0).any()):
            self.num_reloaded += self.reload(experts._replace(physical_to_logical=missing))
        self.experts = experts

    # --8<-- [start:sources-of-experts]
    def _move_layer(
        self, experts: FusedExperts, old: list[list[int]], new: list[list[int]]
    ) -> list[list[int]]:
        """Move the weights of one layer. Returns the logical experts of `new` that no
        live part of `old` has, or -1."""
        group = self.ranks.size // self.ep
        own, index = divmod(self.ranks.rank, group)
        sources = [[self._source(e, part, old) for e in row] for part, row in enumerate(new)]
        sent = [old[own].index(e) for p in range(self.ep) for e, s in zip(new[p], sources[p]) if s == own]
        received = [i for s in range(self.ep) for i, source in enumerate(sources[own]) if source == s]
        # --8<-- [end:sources-of-experts]
        # --8<-- [start:move-experts]
        send_counts, receive_counts = [0] * self.ranks.size, [0] * self.ranks.size
        for part in range(self.ep):
            send_counts[part * group + index] = sources[part].count(own)
            receive_counts[part * group + index] = sources[own].count(part)
        for parameter in experts.parameters():
            weight = parameter.data.view(torch.uint8)  # of any type; scales too
            # Indexing copies, so all weights are sent before one is overwritten.
            weight[received] = self.ranks.all_to_all(weight[sent], send_counts, receive_counts)
        self.num_moved += len(received) - sources[own].count(own)
        return [[e if s < 0 else -1 for e, s in zip(row, from_)] for row, from_ in zip(new, sources)]
        # --8<-- [end:move-experts]

    def _source(self, expert: int, part: int, old: list[list[int]]) -> int:
        """The live part from which `part` gets an expert, itself if possible; -1: none has it."""
        having = [p for p in self.live if expert in old[p]]
        return part if part in having else min(having, default=-1)
