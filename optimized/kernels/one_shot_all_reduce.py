"""Sum over the ranks of one computer in one launch: each rank reads the inputs of all, in their order.

Roofline bound: (size - 1) * n * itemsize bytes read over NVLink; for a few kilobytes it is one launch, and
one signal to a peer. Loses to two-shot and ring sums for large n, of which it reads (size - 1) times all.

A block of the input has its own signals, step counter and place in the buffers, so blocks do not wait for one
another:

1. copy the block into this rank's buffer, the one of two that the parity of the step says;
2. signal the step to all ranks, and wait until all have signaled it: their inputs are there;
3. read the block of all ranks, and add in float32 in the order of ranks: the same bits everywhere.

The buffer is written again two steps later. Then all ranks have signaled the step between, so they have ended
this one. All state is in device memory: launches in a CUDA graph go on counting.

Not yet run on two GPUs. Tested in Triton's interpreter, between processes that share memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from optimized.kernels.portable import INTERPRETED, rounded

BLOCK = 2048


@triton.jit
def _one_shot_kernel(
    x_ptr, y_ptr, buffer_addresses, signal_addresses, steps_ptr, n, num_slots, rank,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    step = tl.load(steps_ptr + block) + 1
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    place = (step % 2) * num_slots + offsets
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    own = tl.load(buffer_addresses + rank).to(tl.pointer_type(dtype))
    tl.store(own + place, tl.load(x_ptr + offsets, mask=mask), mask=mask)
    tl.debug_barrier()  # all threads have written before one signals

    for peer in tl.static_range(SIZE):
        theirs = tl.load(signal_addresses + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + block * SIZE + rank, step, sem="release", scope="sys")
    mine = tl.load(signal_addresses + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        signal = mine + block * SIZE + peer
        # A signal may be one step ahead: a rank that has ended this step begins the next.
        while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < step:
            pass
    tl.debug_barrier()  # no thread reads before one has seen the signals

    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        buffer = tl.load(buffer_addresses + peer).to(tl.pointer_type(dtype))
        total += tl.load(buffer + place, mask=mask, other=0.0, volatile=True).to(tl.float32)
    tl.store(y_ptr + offsets, rounded(total, dtype), mask=mask)
    tl.store(steps_ptr + block, step)


class OneShotAllReduce:
    """One rank of a group. `buffers`, `signals`: the memory of all ranks, in their order, as this rank
    addresses it; `buffers` of [2, num_slots], `signals` int32 zeros of [num_slots / BLOCK, size]."""

    def __init__(self, buffers: Sequence[torch.Tensor], signals: Sequence[torch.Tensor], rank: int) -> None:
        self.rank, self.size = rank, len(buffers)
        self.num_slots, self.dtype = buffers[rank].shape[1], buffers[rank].dtype
        assert self.num_slots % BLOCK == 0
        device = buffers[rank].device
        self._memory = (buffers, signals)  # kept alive
        self._buffers = torch.tensor([x.data_ptr() for x in buffers], device=device)
        self._signals = torch.tensor([x.data_ptr() for x in signals], device=device)
        self._steps = torch.zeros(self.num_slots // BLOCK, dtype=torch.int32, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in x's shape and dtype. x: contiguous, of the buffers' dtype, at most num_slots
        elements. All ranks call it with the same number of elements, on one stream each."""
        assert x.is_contiguous()
        assert x.dtype == self.dtype
        assert x.numel() <= self.num_slots, f"{x.numel()} elements; the buffers have {self.num_slots}"
        y = torch.empty_like(x)
        if x.numel() > 0:
            _one_shot_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x, y, self._buffers, self._signals, self._steps, x.numel(), self.num_slots, self.rank,
                SIZE=self.size, BLOCK=BLOCK, num_warps=1 if INTERPRETED else 8,
            )  # fmt: skip
        return y
