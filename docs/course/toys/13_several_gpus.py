# --8<-- [start:toy-group]
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch.nn.functional as F


class Group:
    """Ranks are threads. Each puts its tensor into a list that all of them read."""

    def __init__(self, size):
        self.size, self.parts, self.barrier = size, [None] * size, Barrier(size)

    def all_reduce(self, rank, x):
        self.parts[rank] = x
        self.barrier.wait()  # all parts are there
        total = sum(self.parts[1:], self.parts[0])  # ranks 0, 1, ...: the same bits everywhere
        self.barrier.wait()  # all ranks have read them
        return total


def on_ranks(size, function):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size)))
        # --8<-- [end:toy-group]


# --8<-- [start:toy-mlp]
def column_parallel(w, rank, size):
    """[out, in] -> [out / size, in]: some of the outputs."""
    return w.chunk(size, dim=0)[rank]


def row_parallel(w, rank, size):
    """[out, in] -> [out, in / size]: a summand of every output."""
    return w.chunk(size, dim=1)[rank]


def mlp(x, w_up, w_down, bias):
    return F.linear(F.silu(F.linear(x, w_up)), w_down, bias)


def mlp_of_rank(group, rank, x, w_up, w_down, bias):
    """x is the same on all ranks, and so is the result. One sum over ranks."""
    hidden = F.silu(F.linear(x, column_parallel(w_up, rank, group.size)))
    part = F.linear(hidden, row_parallel(w_down, rank, group.size), bias if rank == 0 else None)
    return group.all_reduce(rank, part)
    # --8<-- [end:toy-mlp]
