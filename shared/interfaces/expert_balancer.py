"""Contract of the expert balancer: which rank has which experts, and how many replicas of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch


class ExpertMap(NamedTuple):
    """Where the experts of each layer are. A logical expert is one that the router chooses. A physical expert
    is a place for the weights of one: rank r has the physical experts [r * n, (r + 1) * n) with
    n = num_physical / num_ranks. int64, on the CPU."""

    physical_to_logical: torch.Tensor  # [num_layers, num_physical]
    logical_to_physical: torch.Tensor  # [num_layers, num_logical, max_replicas] ascending, then -1
    num_replicas: torch.Tensor  # [num_layers, num_logical]


class ExpertBalancer(ABC):
    """EPLB: experts with much load get replicas, and ranks get experts of about the same load in sum.

    Stateless. The same arguments give the same result, and no argument is modified."""

    @abstractmethod
    def balance(
        self,
        load: torch.Tensor,
        num_physical: int,
        num_ranks: int,
        num_groups: int = 1,
        num_nodes: int = 1,
    ) -> ExpertMap:
        """load [num_layers, num_logical]: how many tokens chose each expert. Layers are independent. An
        expert's load is divided equally among its replicas.

        - Every logical expert has a replica, and at most one on each rank.
        - The largest load of a replica is as small as num_physical physical experts allow.
        - The loads of two ranks of a node differ by at most the largest load of a replica on the node.
        - Of experts with equal load, the one with the lower number gets the replica.

        `num_nodes`: machines, each with num_ranks / num_nodes successive ranks. `num_groups`: groups of
        successive experts, of which the router chooses some for a token. If num_groups is a multiple of
        num_nodes, the placement is hierarchical: each node has as many groups as the others, with all
        replicas of their experts, and as many physical experts. What is said above about replicas then
        holds within each node. Otherwise it is global, as with one node.

        Raises `ValueError` for loads that are negative or not finite, and for numbers that do not fit:
        num_physical is a multiple of num_ranks, from num_logical to num_logical * num_ranks (within a node:
        num_logical / num_nodes times its ranks); num_ranks is a multiple of num_nodes and num_logical of
        num_groups."""
