"""Expert maps, and what balancing is worth."""

from __future__ import annotations

import pytest
import torch

from diptych.reference.parallel.expert_balancer import ExpertBalancer
from diptych.shared.parallel.expert_map import in_order, map_of, rank_loads
from diptych.shared.tools.bench.experts import ExpertsCase, placements


def zipf(num_layers: int, num_experts: int) -> torch.Tensor:
    order = torch.rand(num_layers, num_experts, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return 1000 / (1 + order.to(torch.float64))


def test_the_placement_in_order() -> None:
    experts = in_order(2, 5, 8)
    assert experts.physical_to_logical.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2
    assert experts.logical_to_physical[0].tolist() == [[0, 5], [1, 6], [2, 7], [3, -1], [4, -1]]
    assert experts.num_replicas[1].tolist() == [2, 2, 2, 1, 1]


def test_an_expert_that_is_nowhere() -> None:
    with pytest.raises(ValueError, match="expert 2 of layer 1 has no physical expert"):
        map_of(torch.tensor([[0, 1, 2], [0, 1, 1]]), 3)


@pytest.mark.parametrize(("num_experts", "num_redundant", "num_ranks"), [(64, 0, 8), (64, 16, 8), (6, 2, 2)])
def test_no_rank_has_more_load_than_in_order(num_experts: int, num_redundant: int, num_ranks: int) -> None:
    load, num_physical = zipf(4, num_experts), num_experts + num_redundant
    before = rank_loads(load, in_order(4, num_experts, num_experts), num_ranks)
    after = rank_loads(load, ExpertBalancer().balance(load, num_physical, num_ranks), num_ranks)
    assert torch.allclose(before.sum(-1), after.sum(-1))
    assert (after.amax(-1) <= before.amax(-1)).all()


def test_exchanges_follow_one_another() -> None:
    """Each counts with the loads of the ranks after the one before."""
    load = torch.tensor([[11.0, 7.0, 7.0, 13.0, 12.0, 2.0]])
    assert rank_loads(load, ExpertBalancer().balance(load, 6, 2), 2).tolist() == [[26.0, 26.0]]


def test_the_table_of_placements() -> None:
    in_order_, balanced, redundant = placements(ExpertsCase(num_layers=3, num_experts=32, num_ranks=4))
    assert in_order_.worst >= balanced.worst >= redundant.worst >= 1.0
    assert redundant.worst < 1.01
    with pytest.raises(ValueError, match="10 experts are not a multiple of 4 ranks"):
        placements(ExpertsCase(num_experts=10, num_ranks=4))
