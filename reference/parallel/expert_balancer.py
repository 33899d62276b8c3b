"""EPLB: replicas for the experts with the most load, and ranks of about the same load.

Two greedy steps. `replicate` gives each spare physical expert to the logical expert whose replicas have the
largest load. `pack` assigns replicas to ranks in rounds, in which every rank gets one, the heaviest replica
going to the lightest rank. In one round the difference of two ranks grows by at most (heaviest - lightest
replica of the round), and rounds are in descending order, so all ranks end within one replica's load of each
other. Then the heaviest and the lightest rank exchange replicas while that reduces their difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.interfaces import expert_balancer as interface
from diptych.shared.interfaces.expert_balancer import ExpertMap
from diptych.shared.parallel.expert_map import map_of


class ExpertBalancer(interface.ExpertBalancer):
    def balance(
        self,
        load: torch.Tensor,
        num_physical: int,
        num_ranks: int,
        num_groups: int = 1,
        num_nodes: int = 1,
    ) -> ExpertMap:
        num_logical = load.shape[1]
        _check(load, num_physical, num_ranks, num_groups, num_nodes)
        if num_groups % num_nodes != 0:
            num_groups = num_nodes = 1  # global
        rows = [
            _balance_layer(layer, num_physical, num_ranks, num_groups, num_nodes)
            for layer in load.to(torch.float64).tolist()
        ]
        return map_of(torch.tensor(rows, dtype=torch.int64).view(-1, num_physical), num_logical)


# --8<-- [start:balance-experts]
def _balance_layer(
    load: list[float], num_physical: int, num_ranks: int, num_groups: int, num_nodes: int
) -> list[int]:
    """The logical expert of each physical one, rank by rank."""
    group_size = len(load) // num_groups
    groups = [range(i, i + group_size) for i in range(0, len(load), group_size)]
    group_loads = [sum(load[e] for e in group) for group in groups]
    num_ranks //= num_nodes  # of a node
    placed = []
    for node in pack(list(range(num_groups)), group_loads, num_nodes):
        experts = sorted(e for group in node for e in groups[group])
        counts = replicate([load[e] for e in experts], num_physical // num_nodes, num_ranks)
        replicas = [e for e, count in zip(experts, counts) for _ in range(count)]
        shares = [load[e] / count for e, count in zip(experts, counts) for _ in range(count)]
        for rank in pack(replicas, shares, num_ranks):
            placed += sorted(rank)
    return placed


# --8<-- [end:balance-experts]


def replicate(load: Sequence[float], num_physical: int, most: int) -> list[int]:
    """How many replicas each expert has, at most `most`."""
    counts = [1] * len(load)
    for _ in range(num_physical - len(load)):
        candidates = [e for e in range(len(load)) if counts[e] < most]
        counts[max(candidates, key=lambda e: load[e] / counts[e])] += 1  # the first of the largest
    return counts


# --8<-- [start:pack-experts]
def pack(items: Sequence[int], loads: Sequence[float], num_bins: int) -> list[list[int]]:
    """Pack items into bins with equally many items. An item that occurs n <= num_bins
    times, with equal loads, is in n bins."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    totals = [0.0] * num_bins
    order = sorted(range(len(items)), key=lambda i: (-loads[i], items[i]))  # replicas follow each other
    for start in range(0, len(order), num_bins):
        free = set(range(num_bins))  # each bin gets one item of the round
        for i in order[start : start + num_bins]:
            target = min((b for b in free if items[i] not in bins[b]), key=lambda b: (totals[b], b))
            bins[target].append(items[i])
            totals[target] += loads[i]
            free.remove(target)
    # --8<-- [end:pack-experts]
    load_of = dict(zip(items, loads))
    while (swap := _best_swap(bins, totals, load_of)) is not None:
        high, low, i, j = swap
        difference = load_of[bins[high][i]] - load_of[bins[low][j]]
        bins[high][i], bins[low][j] = bins[low][j], bins[high][i]
        totals[high] -= difference
        totals[low] += difference
    return bins


def _best_swap(
    bins: list[list[int]], totals: list[float], load_of: dict[int, float]
) -> tuple[int, int, int, int] | None:
    """The heaviest and the lightest bin, and the places of the items whose exchange reduces their difference
    most. None: no exchange reduces it by a thousandth."""
    high, low = totals.index(max(totals)), totals.index(min(totals))
    gap = totals[high] - totals[low]
    best, least = None, 0.999 * gap
    for i, heavy in enumerate(bins[high]):
        for j, light in enumerate(bins[low]):
            left = abs(gap - 2 * (load_of[heavy] - load_of[light]))
            if left < least and heavy not in bins[low] and light not in bins[high]:
                best, least = (high, low, i, j), left
    return best


def _check(load: torch.Tensor, num_physical: int, num_ranks: int, num_groups: int, num_nodes: int) -> None:
    num_logical = load.shape[1]
    if not bool((load.isfinite() & (load >= 0)).all()):
        raise ValueError("loads of experts must be finite and not negative")
    for name, number, of, divisor in (
        ("num_physical", num_physical, "num_ranks", num_ranks),
        ("num_ranks", num_ranks, "num_nodes", num_nodes),
        ("num_logical", num_logical, "num_groups", num_groups),
    ):
        if divisor < 1 or number % divisor != 0:
            raise ValueError(f"{name} ({number}) must be a multiple of {of} ({divisor})")
    is_global = num_groups % num_nodes != 0
    most = num_logical * (num_ranks if is_global else num_ranks // num_nodes)
    if not num_logical <= num_physical <= most:
        raise ValueError(
            f"num_physical ({num_physical}) must be from {num_logical}, the logical experts, to {most}: an "
            f"expert has at most one replica on each of {num_ranks} ranks of {num_nodes} nodes"
        )
