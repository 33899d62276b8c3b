"""The one-shot sum over ranks, between processes that share memory, in Triton's interpreter."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import pytest
import torch

from optimized.kernels.one_shot_all_reduce import BLOCK, OneShotAllReduce
from optimized.kernels.portable import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs two GPUs, or processes of the interpreter")
NUM_BLOCKS = 2


def shared(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that processes which are forked share, at the same address."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=dtype).view(shape)


def inputs(rank: int, step: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def on_processes(
    size: int, lengths: list[int], dtype: torch.dtype, late: Callable[[int, int], float]
) -> torch.Tensor:
    """What each rank gets in each step, [size, steps, longest]; `late`: seconds before a rank's step."""
    buffers = [shared(2, NUM_BLOCKS * BLOCK, dtype=dtype) for _ in range(size)]
    signals = [shared(NUM_BLOCKS, size, dtype=torch.int32) for _ in range(size)]
    results = shared(size, len(lengths), max(lengths), dtype=dtype)
    children = []
    for rank in range(size):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                all_reduce = OneShotAllReduce(buffers, signals, rank)
                for step, num in enumerate(lengths):
                    time.sleep(late(rank, step))
                    results[rank, step, :num] = all_reduce(inputs(rank, step, num, dtype))
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * size
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_the_ordered_sum_has_the_same_bits_on_all_ranks(size: int, dtype: torch.dtype) -> None:
    """Whichever rank is late, and whatever the sizes of the steps."""
    lengths = [1, BLOCK, BLOCK + 1, 7, 2 * BLOCK, 2 * BLOCK, 63]
    found = on_processes(size, lengths, dtype, lambda rank, step: 0.02 * ((step + rank) % size))
    for step, num in enumerate(lengths):
        total = torch.zeros(num)
        for rank in range(size):
            total = total + inputs(rank, step, num, dtype).float()
        for rank in range(size):
            assert torch.equal(found[rank, step, :num], total.to(dtype)), (rank, step)


def test_one_rank_and_no_elements() -> None:
    buffer, signal = torch.zeros(1, 2, BLOCK), torch.zeros(1, 1, 1, dtype=torch.int32)
    all_reduce = OneShotAllReduce(list(buffer), list(signal), 0)
    x = torch.randn(3, 5)
    assert torch.equal(all_reduce(x), x)
    assert all_reduce(torch.empty(0, 5)).shape == (0, 5)
    with pytest.raises(AssertionError, match="the buffers have 2048"):
        all_reduce(torch.zeros(BLOCK + 1))
