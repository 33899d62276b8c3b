"""Expert maps: from the placement of physical experts to its inverse, and a replica for each token."""

from __future__ import annotations

import torch

from diptych.shared.interfaces.expert_balancer import ExpertMap


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


class ExpertPlacement:
    """`diptych.shared.interfaces.expert_dispatch.Placement`, taken from one layer of a map. `use` overwrites
    it."""

    def __init__(self, experts: ExpertMap, layer: int, device: torch.device) -> None:
        """layer: the row of the map."""
        num_physical, num_logical = experts.physical_to_logical.shape[1], experts.num_replicas.shape[1]
        most = num_physical - num_logical + 1  # replicas of one expert, in any later map
        self.layer = layer
        self.logical_to_physical = torch.full((num_logical, most), -1, dtype=torch.int64, device=device)
        self.num_replicas = torch.empty(num_logical, dtype=torch.int64, device=device)
        self.load = torch.zeros(num_logical, dtype=torch.int64, device=device)
        self.use(experts)

    def use(self, experts: ExpertMap) -> None:
        """Use another map from now on."""
        places = experts.logical_to_physical[self.layer]
        self.logical_to_physical[:, : places.shape[1]].copy_(places)
        self.num_replicas.copy_(experts.num_replicas[self.layer])

    # --8<-- [start:choose-replicas]
    def choose(self, topk_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """topk_ids [num_tokens, k], logical -> physical, int32. -1 stays -1. Replicas take
        turns; the first token gets number `first` of them."""
        ids, is_real = topk_ids.long(), topk_ids >= 0
        self.load.scatter_add_(0, ids.clamp(min=0).flatten(), is_real.long().flatten())
        row = torch.arange(first, first + len(ids), device=ids.device)[:, None]
        physical = self.logical_to_physical[ids, row % self.num_replicas[ids]]
        return torch.where(is_real, physical, -1).to(torch.int32)

    # --8<-- [end:choose-replicas]
