"""Planted bugs in the expert balancer."""

from __future__ import annotations

import torch

from diptych.reference.parallel.expert_balancer import ExpertBalancer
from diptych.shared.parallel.expert_map import in_order, map_of
from tests.conformance.mutants.mutant import bugs_in, mutant_of


@mutant_of("expert_balancer")
class IgnoresTheLoad(ExpertBalancer):
    """Experts in their order, and the first of them again."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        return in_order(*load.shape, num_physical)


@mutant_of("expert_balancer")
class ReplicatesByTheWholeLoad(ExpertBalancer):
    """All spare physical experts go to the expert with the most load: its replicas are not counted."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        order = (-load).argsort(-1, stable=True)
        ranked = torch.arange(load.shape[1], 0, -1, dtype=load.dtype).expand_as(load)
        steep = torch.zeros_like(load).scatter(1, order, ranked**8)
        return super().balance(steep * (load > 0), num_physical, num_ranks, num_groups, num_nodes)


@mutant_of("expert_balancer")
class ReplicasOnOneRank(ExpertBalancer):
    """Physical experts in the order of the logical ones: replicas are neighbours."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        placed = super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        return map_of(placed.physical_to_logical.sort(-1).values, load.shape[1])


@mutant_of("expert_balancer")
class AlwaysGlobal(ExpertBalancer):
    """Nodes are ignored."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        return super().balance(load, num_physical, num_ranks)


@mutant_of("expert_balancer")
class GroupsInOrder(ExpertBalancer):
    """Node n has the nth part of the experts, whatever their load."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        if num_groups % num_nodes != 0 or num_nodes == 1:
            return super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        parts = [
            super(GroupsInOrder, self)
            .balance(part, num_physical // num_nodes, num_ranks // num_nodes)
            .physical_to_logical
            + i * part.shape[1]
            for i, part in enumerate(load.chunk(num_nodes, dim=1))
        ]
        return map_of(torch.cat(parts, dim=1), load.shape[1])


@mutant_of("expert_balancer")
class RanksInOrder(ExpertBalancer):
    """Replicas in descending order of load: the first rank gets the heaviest ones."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        placed = super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        rows = placed.physical_to_logical
        shares = (load / placed.num_replicas).gather(1, rows)
        return map_of(rows.gather(1, (-shares).argsort(-1, stable=True)), load.shape[1])


@mutant_of("expert_balancer")
class OneMapForAllLayers(ExpertBalancer):
    """The loads of all layers are added."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        total = load.sum(0, keepdim=True).expand_as(load)
        return super().balance(total, num_physical, num_ranks, num_groups, num_nodes)


@mutant_of("expert_balancer")
class StaleInverse(ExpertBalancer):
    """The map from logical to physical experts is that of the placement in order."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        placed = super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        stale = in_order(*load.shape, num_physical)
        return placed._replace(logical_to_physical=stale.logical_to_physical)


@mutant_of("expert_balancer")
class DividesInPlace(ExpertBalancer):
    """Loads become shares, in the caller's tensor."""

    def balance(self, load, num_physical, num_ranks, num_groups=1, num_nodes=1):
        placed = super().balance(load, num_physical, num_ranks, num_groups, num_nodes)
        load /= placed.num_replicas
        return placed


bug = bugs_in(
    "expert_balancer", "reference.parallel.expert_balancer:ExpertBalancer", folder="reference.parallel."
)
# fmt: off
bug("TheLastOfEqualsIsCopied", "Of experts with equal load the last ones get the replicas.",
    ("expert_balancer", "max(candidates, key=", "max(reversed(candidates), key="))
bug("LightestFirst", "Replicas are packed lightest first, so that the heaviest has no counterweight.",
    ("expert_balancer", "(-loads[i], items[i])", "(loads[i], items[i])"),
    ("expert_balancer", "swap := _best_swap(bins, totals, load_of)", "swap := None"))
