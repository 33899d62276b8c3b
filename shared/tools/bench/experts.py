"""Simulates the balance of experts over ranks for several placements, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.shared import registry
from diptych.shared.parallel.expert_map import in_order, rank_loads
from diptych.shared.tools.bench.workloads import check_least


@dataclass(frozen=True)
class ExpertsCase:
    """Layers whose experts have loads of 1/1, 1/2, 1/3 ... in random order (Zipf's law)."""

    num_layers: int = 32
    num_experts: int = 128
    num_redundant: int = 16
    num_ranks: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, num_layers=1, num_experts=1, num_redundant=0, num_ranks=1)

    def load(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.rand(self.num_layers, self.num_experts, generator=generator).argsort(-1)
        return 1.0 / (1 + order.to(torch.float64))


@dataclass(frozen=True)
class ExpertsResult:
    """The load of the busiest rank, over the mean of the ranks: 1 is balanced."""

    placement: str
    num_physical: int
    median: float  # of the layers
    worst: float


def placements(case: ExpertsCase, balancer: str = "reference") -> list[ExpertsResult]:
    """The placements to compare: experts in order, balanced, and balanced with redundant experts. Raises
    `ValueError` for numbers that the balancer refuses."""
    load, place = case.load(), registry.load("expert_balancer", balancer)().balance
    num_physical = case.num_experts + case.num_redundant
    if case.num_experts % case.num_ranks != 0:
        raise ValueError(f"{case.num_experts} experts are not a multiple of {case.num_ranks} ranks")
    found = {
        "in order": in_order(case.num_layers, case.num_experts, case.num_experts),
        "balanced": place(load, case.num_experts, case.num_ranks),
        "balanced, with redundant experts": place(load, num_physical, case.num_ranks),
    }
    results = []
    for name, experts in found.items():
        loads = rank_loads(load, experts, case.num_ranks)
        ratio = loads.amax(-1) / loads.mean(-1)
        size = experts.physical_to_logical.shape[1]
        results.append(ExpertsResult(name, size, float(ratio.median()), float(ratio.max())))
    return results
