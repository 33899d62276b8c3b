"""Clauses of the expert balancer: replicas, ranks, nodes."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import torch

from diptych.shared.interfaces import ExpertBalancer, ExpertMap
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true

NUM_LAYERS = 3


class Placement(Case):
    """A placement problem with random integer loads. `num_redundant`: physical experts beyond one for each
    logical expert."""

    num_logical = 16
    num_redundant = 8
    num_ranks = 4
    num_groups = 1
    num_nodes = 1
    loads = "zipf"

    @property
    def num_physical(self) -> int:
        return self.num_logical + self.num_redundant

    @property
    def num_parts(self) -> int:
        """The number of nodes that are balanced separately; 1: the placement is global."""
        return self.num_nodes if self.num_groups % self.num_nodes == 0 else 1

    def load(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.num_logical + self.num_physical)
        if self.loads == "equal":
            return torch.full((NUM_LAYERS, self.num_logical), 7.0)
        if self.loads == "none":
            return torch.zeros(NUM_LAYERS, self.num_logical)
        order = torch.rand(NUM_LAYERS, self.num_logical, generator=generator).argsort(-1)
        return torch.floor(
            10_000 / (1 + order).to(torch.float32) ** (3.0 if self.loads == "one hot" else 1.0)
        )

    def place(self, impl: type[ExpertBalancer]) -> ExpertMap:
        return impl().balance(self.load(), self.num_physical, self.num_ranks, self.num_groups, self.num_nodes)


PLACEMENTS = table(
    "num_logical num_redundant num_ranks num_groups num_nodes",
    ("no redundant expert", 16, 0, 4),
    ("8 redundant", 16, 8, 4),
    ("one rank", 5, 0, 1),
    ("one expert a rank", 8, 0, 8),
    ("as many redundant as logical", 6, 6, 4),
    ("everywhere", 3, 9, 4),
    ("two nodes", 16, 8, 4, 8, 2),
    ("four nodes of two ranks", 32, 16, 8, 8, 4),
    ("groups that nodes do not divide", 12, 4, 4, 3, 2),
    ("128 experts", 128, 32, 16, 8, 2),
    of=Placement,
    num_groups=1,
    num_nodes=1,
)
EVERY_LOAD = tuple(
    case.replace(name=f"{case.name}, {loads}", loads=loads)
    for case, loads in product(PLACEMENTS, ("zipf", "one hot", "equal", "none"))
)


def experts_of(case: Placement, layer: torch.Tensor, num_parts: int) -> list[list[int]]:
    """The logical experts of each of `num_parts` equal parts of a layer's physical experts."""
    parts: list[list[int]] = layer.view(num_parts, -1).tolist()
    return parts


@contract("Every logical expert has a physical one; the three maps agree.", EVERY_LOAD)
def maps_agree(impl: type[ExpertBalancer], case: Placement) -> None:
    placed = case.place(impl)
    expect_equal("num_physical", placed.physical_to_logical.shape, (NUM_LAYERS, case.num_physical))
    expect_equal("num_replicas", placed.num_replicas.shape, (NUM_LAYERS, case.num_logical))
    for layer, inverse, counts in zip(*placed):
        for e in range(case.num_logical):
            found = (layer == e).nonzero()[:, 0].tolist()
            expect_true(f"expert {e} is somewhere", bool(found))
            expect_equal(f"replicas of expert {e}", int(counts[e]), len(found))
            padding = [-1] * (inverse.shape[1] - len(found))
            expect_equal(f"physical experts of {e}", inverse[e].tolist(), found + padding)


@contract("An expert has at most one replica on a rank.", EVERY_LOAD)
def replicas_on_different_ranks(impl: type[ExpertBalancer], case: Placement) -> None:
    for layer in case.place(impl).physical_to_logical:
        for rank, experts in enumerate(experts_of(case, layer, case.num_ranks)):
            expect_equal(f"experts of rank {rank}", len(set(experts)), len(experts))


@contract("No other numbers of replicas have a smaller largest load of a replica.", EVERY_LOAD)
def largest_replica(impl: type[ExpertBalancer], case: Placement) -> None:
    ranks_of_part = case.num_ranks // case.num_parts
    for loads, layer in zip(case.load().tolist(), case.place(impl).physical_to_logical):
        for experts in experts_of(case, layer, case.num_parts):
            counts = {e: experts.count(e) for e in experts}
            largest = max(Fraction(int(loads[e]), count) for e, count in counts.items())
            if largest == 0:
                continue
            needed = [math.floor(int(loads[e]) / largest) + 1 for e in counts]  # to be below it
            is_possible = max(needed) <= ranks_of_part and sum(needed) <= len(experts)
            expect_true(f"no smaller load than {largest}", not is_possible)


@contract("The loads of a node's ranks differ by at most the largest load of a replica.", EVERY_LOAD)
def balanced_ranks(impl: type[ExpertBalancer], case: Placement) -> None:
    placed = case.place(impl)
    for loads, layer, counts in zip(case.load().tolist(), placed.physical_to_logical, placed.num_replicas):
        shares = [Fraction(int(loads[e]), int(counts[e])) for e in range(case.num_logical)]
        for part in layer.view(case.num_parts, -1):
            ranks = experts_of(case, part, case.num_ranks // case.num_parts)
            totals = [sum(shares[e] for e in rank) for rank in ranks]
            most = max(shares[e] for rank in ranks for e in rank)
            expect_true(f"difference of at most {most}", max(totals) - min(totals) <= most, totals)


@contract(
    "Where nodes divide the groups, a node has whole groups, as many as the others.",
    [case for case in EVERY_LOAD if case.num_parts > 1],
)
def groups_on_nodes(impl: type[ExpertBalancer], case: Placement) -> None:
    group_size = case.num_logical // case.num_groups
    for layer in case.place(impl).physical_to_logical:
        seen: list[int] = []
        for node in experts_of(case, layer, case.num_nodes):
            groups = {e // group_size for e in node}
            expect_equal("groups of a node", len(groups), case.num_groups // case.num_nodes)
            expect_equal("experts of a node", len(set(node)), len(groups) * group_size)
            seen += groups
        expect_equal("all groups", sorted(seen), list(range(case.num_groups)))


@contract("Nodes are filled with groups of about the same load.", EXAMPLE)
def balanced_nodes(impl: type[ExpertBalancer], case: Case) -> None:
    load = torch.tensor([[8.0, 8.0, 7.0, 7.0, 1.0, 1.0, 2.0, 2.0]])  # groups of 16, 14, 2 and 4
    placed = impl().balance(load, 8, 2, num_groups=4, num_nodes=2).physical_to_logical[0]
    totals = [sum(load[0, e].item() for e in node) for node in placed.view(2, -1).tolist()]
    expect_equal("loads of the nodes", sorted(totals), [18.0, 18.0])


@contract("If the groups are no multiple of the nodes, the placement is that of one node.", EXAMPLE)
def global_placement(impl: type[ExpertBalancer], case: Case) -> None:
    load = Placement("", num_logical=12, num_redundant=4).load()
    odd = impl().balance(load, 16, 4, num_groups=3, num_nodes=2)
    expect_equal("placement", odd.physical_to_logical, impl().balance(load, 16, 4).physical_to_logical)


@contract("The same arguments give the same placement, and are not modified.", EVERY_LOAD[:4])
def deterministic(impl: type[ExpertBalancer], case: Placement) -> None:
    balancer, load = impl(), case.load()
    first = balancer.balance(load, case.num_physical, case.num_ranks)
    expect_equal("load", load, case.load())
    again = balancer.balance(load, case.num_physical, case.num_ranks)
    for mine, its in zip(first, again):
        expect_equal("a map", mine, its)


@contract("Layers are independent.", EXAMPLE)
def layers_are_independent(impl: type[ExpertBalancer], case: Case) -> None:
    load = Placement("", num_logical=8).load()
    together = impl().balance(load, 12, 4).physical_to_logical
    for i in range(NUM_LAYERS):
        expect_equal(f"layer {i}", impl().balance(load[i : i + 1], 12, 4).physical_to_logical[0], together[i])


@contract("Of experts with equal load, those with the lower numbers get the replicas.", EXAMPLE)
def ties(impl: type[ExpertBalancer], case: Case) -> None:
    counts = impl().balance(torch.ones(1, 6), 8, 2).num_replicas[0]
    expect_equal("replicas", counts.tolist(), [2, 2, 1, 1, 1, 1])


@contract(
    "Loads and numbers that do not fit are a ValueError.",
    table(
        "load num_physical num_ranks num_groups num_nodes",
        ("fewer physical than logical", (1.0, 2.0), 1, 1),
        ("more replicas than ranks", (1.0, 2.0), 6, 2),
        ("physical and ranks", (1.0, 2.0), 3, 2),
        ("ranks and nodes", (1.0, 2.0), 3, 3, 2, 2),
        ("groups", (1.0, 2.0, 3.0), 4, 2, 2, 1),
        ("more replicas than ranks of a node", (1.0, 2.0), 8, 4, 2, 2),
        ("no rank", (1.0, 2.0), 2, 0),
        ("negative load", (1.0, -2.0), 2, 2),
        ("NaN", (1.0, math.nan), 2, 2),
        num_groups=1,
        num_nodes=1,
    ),
)
def refused(impl: type[ExpertBalancer], case: Case) -> None:
    load = torch.tensor([case.load])
    numbers = (case.num_physical, case.num_ranks, case.num_groups, case.num_nodes)
    expect_raises(case.name, ValueError, impl().balance, load, *numbers)
