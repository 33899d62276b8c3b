"""The first use of a group of ranks, before memory is measured."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import Collectives

NUM_SMALL = 1
NUM_LARGE = 2**23
"""Elements: NCCL has other algorithms for many bytes, each with connections and buffers of its own."""


def warm_up(ranks: Collectives, device: torch.device, moves_experts: bool = False) -> None:
    """Use each operation that steps use once, so that what it allocates is there. On a CPU nothing is
    allocated, and one sum finds out whether the ranks reach each other. `moves_experts`: with experts on
    several ranks."""
    if ranks.size == 1:
        return
    ranks.all_reduce(torch.zeros(NUM_SMALL, device=device))
    if device.type != "cuda":
        return
    for num in (NUM_SMALL, NUM_LARGE):
        x = torch.zeros(num, dtype=torch.bfloat16, device=device)
        ranks.all_reduce(x)
        ranks.all_gather(x)
        ranks.broadcast(x)
        if moves_experts:
            rows = x.new_zeros(ranks.size, num // ranks.size + 1)
            ranks.all_to_all(rows, [1] * ranks.size, [1] * ranks.size)
            ranks.reduce_scatter(rows)
    torch.cuda.synchronize(device)
