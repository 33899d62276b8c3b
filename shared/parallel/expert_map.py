"""Expert maps: from the placement of physical experts to its inverse."""

from __future__ import annotations

import torch

from shared.interfaces.expert_balancer import ExpertMap


def map_of(physical_to_logical: torch.Tensor, num_logical: int) -> ExpertMap:
    """The map of a placement [num_layers, num_physical]. Raises `ValueError` if an expert has no place."""
    layers = [[(row == e).nonzero()[:, 0] for e in range(num_logical)] for row in physical_to_logical]
    missing = [(i, e) for i, layer in enumerate(layers) for e, found in enumerate(layer) if not len(found)]
    if missing:
        raise ValueError(f"expert {missing[0][1]} of layer {missing[0][0]} has no physical expert")
    num_replicas = torch.tensor([[len(found) for found in layer] for layer in layers], dtype=torch.int64)
    most = int(num_replicas.max()) if num_replicas.numel() else 0
    inverse = torch.full((len(layers), num_logical, most), -1, dtype=torch.int64)
    for i, layer in enumerate(layers):
        for e, found in enumerate(layer):
            inverse[i, e, : len(found)] = found
    return ExpertMap(physical_to_logical, inverse, num_replicas.view(len(layers), num_logical))


def in_order(num_layers: int, num_logical: int, num_physical: int) -> ExpertMap:
    """The placement before any load is known: experts 0, 1, 2 ..., and from 0 again for redundant ones."""
    row = torch.arange(num_physical, dtype=torch.int64) % num_logical
    return map_of(row.expand(num_layers, -1).contiguous(), num_logical)


def rank_loads(load: torch.Tensor, experts: ExpertMap, num_ranks: int) -> torch.Tensor:
    """The load of each rank if replicas share it equally, [num_layers, num_ranks] float64."""
    share = load.to(torch.float64) / experts.num_replicas
    return share.gather(1, experts.physical_to_logical).unflatten(1, (num_ranks, -1)).sum(-1)
