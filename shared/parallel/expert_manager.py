"""Moves experts between ranks while the engine runs: to balance their load, and after the loss of a rank.

All ranks call the same methods between the same forward passes and compute the same maps. A rank's sends and
receives follow from the old and the new map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from diptych.shared.parallel.expert_map import ExpertPlacement
from diptych.shared.parallel.expert_parallel import ExpertParallel
from diptych.shared.parallel.meeting import is_launched


class ExpertManager:
    """Gives every MoE of the model its `expert_parallel`. The model runner, or the dispatch of ranks in step,
    calls `before_pass`. `interval`: forward passes between two rebalances; None: no rebalancing. `reload`:
    reads the experts of a placement that this rank has (-1: none) from the checkpoint into the model, and
    returns the number of tensors. `num_nodes`: computers with as many successive ranks each; while no rank is
    lost, a group of experts stays on one where these divide the groups."""

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
        num_nodes: int = 1,
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
        of_experts = model.config.moe
        self.num_groups = of_experts.num_expert_groups if of_experts else 1
        self.num_nodes = num_nodes
        if is_launched():  # ranks of computers with different numbers of ranks tell different numbers
            total, squares = ranks.all_reduce(torch.tensor([num_nodes, num_nodes**2])).tolist()
            self.num_nodes = num_nodes if total**2 == ranks.size * squares else 1
        self.reload = reload
        self.numbers: Sequence[int] = range(ranks.size)  # of the ranks, as they were at the start
        self.num_passes = 0
        self.num_moves = 0  # the version of the placement
        self.is_whole = True  # False while experts move
        self.num_moved = 0  # experts that this rank got from others
        self.num_reloaded = 0  # tensors that it read again

    def before_pass(self) -> None:
        """Rebalance when it is time. CUDA graphs remain valid: weights and maps are overwritten in place."""
        if self.num_passes == 0:
            self._forget_load()  # of warming up
        self.num_passes += 1
        if self.interval is not None and self.num_passes % self.interval == 0:
            self.rebalance()

    # --8<-- [start:keep-experts]
    def keep(self, numbers: Sequence[int], is_known: bool) -> None:
        """Go on with the ranks of these numbers, in this order and with a part each.
        `is_known`: all of them agree which rank has which experts. If some have died
        while experts moved, they do not, and every expert is read again."""
        self.is_whole = False
        parts = self.experts.physical_to_logical.unflatten(1, (self.ep, -1))
        if is_known:
            parts = parts[:, [self.numbers.index(number) for number in numbers]]
        else:
            parts = torch.full_like(parts[:, : len(numbers)], -1)
        self.experts = self.experts._replace(physical_to_logical=parts.flatten(1))
        self.ep, self.numbers, self.num_nodes = len(numbers), numbers, 1
        self.rebalance()

    # --8<-- [end:keep-experts]

    def rebalance(self) -> None:
        """Place the experts according to the load since the last call."""
        load = torch.stack([each.load for each in self.placements]).cpu()
        num_physical = self.experts.physical_to_logical.shape[1]
        nodes = self.num_nodes if self._nodes_hold(load.shape[1], num_physical) else 1
        # The same on all ranks.
        load = self.ranks.all_reduce(load)
        self.move(self.balancer.balance(load, num_physical, self.ep, self.num_groups, nodes))
        self._forget_load()

    def _nodes_hold(self, num_logical: int, num_physical: int) -> bool:
        """Whether the ranks of a node can have all replicas of its experts, one of an expert each."""
        return self.ep % self.num_nodes == 0 and num_physical * self.num_nodes <= num_logical * self.ep

    def _forget_load(self) -> None:
        for each in self.placements:
            each.load.zero_()

    def move(self, experts: ExpertMap) -> None:
        """Move the weights to their new places, from the nearest replica or from the checkpoint."""
        self.is_whole = False
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
        self.num_moves += 1
        self.is_whole = True

    # --8<-- [start:sources-of-experts]
    def _move_layer(
        self, experts: FusedExperts, old: list[list[int]], new: list[list[int]]
    ) -> list[list[int]]:
        """Move the weights of one layer. Returns the logical experts of `new` that no
        part of `old` has, or -1."""
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
        """The part from which `part` gets an expert, itself if possible; -1: none has it."""
        having = [p for p, experts in enumerate(old) if expert in experts]
        return part if part in having else min(having, default=-1)
