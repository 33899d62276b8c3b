"""Sum over the ranks of one computer in one launch, alone or fused with residual sum and RMSNorm.

Roofline bound: (size - 1) * n * itemsize bytes read over NVLink; for a few kilobytes it is one launch, and
one signal to a peer. Loses to two-shot and ring sums for large n, of which it reads (size - 1) times all.

A launch is one step of all ranks. Each block of it

1. copies its part of the input into this rank's buffer, the half that the parity of the step says;
2. signals the step to the same block of all ranks, and waits until all have signaled it: their parts are
   there;
3. reads the parts of all ranks, and adds in float32 in the order of ranks: the same bits everywhere.

A half is written again two steps later. Then this rank has ended the step between, in which all ranks have
signaled, so they have ended this step. It does not matter which blocks a launch has. All launches of a rank
must run one after the other. All state is in device memory: replays of a CUDA graph go on counting. Steps
wrap around after 2^32; a signal is at most one step ahead of another, so their difference orders them.

Not yet run on two GPUs. Tested in Triton's interpreter, between processes that share memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from optimized.kernels.portable import INTERPRETED, interpreted_rows, pdl_options, rounded
from optimized.kernels.rms_norm import normed_rows, tile_of_rows

BLOCK = 2048
"""Elements of a block of a sum alone."""
MAX_BLOCKS = 1024
"""Of a launch: a megabyte in tiles of rows (rms_norm.py), which are at least half full, has fewer."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _sum_over_ranks(
    x, offsets, mask, dtype: tl.constexpr, buffer_addresses, signal_addresses, steps_ptr, half_bytes, rank,
    SIZE: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """x: a block of this rank's input, at `offsets` of all of it -> the float32 sum of that block."""
    block = tl.program_id(0)
    step = tl.load(steps_ptr + block) + 1
    half = (step & 1).to(tl.int64) * half_bytes

    own = (tl.load(buffer_addresses + rank) + half).to(tl.pointer_type(dtype))
    tl.store(tl.multiple_of(own, 16) + offsets, x, mask=mask)
    tl.debug_barrier()  # all threads have written before one signals

    for peer in tl.static_range(SIZE):
        theirs = tl.load(signal_addresses + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + block * SIZE + rank, step, sem="release", scope="sys")
    mine = tl.load(signal_addresses + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        signal = mine + block * SIZE + peer
        # A signal may be one step ahead: a rank that has ended this step begins the next.
        while tl.atomic_add(signal, 0, sem="acquire", scope="sys") - step < 0:
            pass
    tl.debug_barrier()  # no thread reads before one has seen the signals

    total = tl.zeros(x.shape, tl.float32)
    for peer in tl.static_range(SIZE):
        buffer = (tl.load(buffer_addresses + peer) + half).to(tl.pointer_type(dtype))
        part = tl.load(tl.multiple_of(buffer, 16) + offsets, mask=mask, other=0.0, volatile=True)
        total += part.to(tl.float32)
    # The counters of all blocks, also of those that this launch does not have; its own is read by no other.
    blocks = tl.arange(0, MAX_BLOCKS)
    tl.store(steps_ptr + blocks, tl.zeros_like(blocks) + step, mask=blocks % tl.num_programs(0) == block)
    return total


@triton.jit
def _one_shot_kernel(
    x_ptr, y_ptr, n, buffer_addresses, signal_addresses, steps_ptr, half_bytes, rank,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, MAX_BLOCKS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = _sum_over_ranks(
        tl.load(x_ptr + offsets, mask=mask), offsets, mask, dtype,
        buffer_addresses, signal_addresses, steps_ptr, half_bytes, rank, SIZE, MAX_BLOCKS,
    )  # fmt: skip
    tl.store(y_ptr + offsets, rounded(total, dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _one_shot_norm_kernel(
    x_ptr, residual_ptr, y_ptr, weight_ptr, num_rows, eps, stride_residual,
    buffer_addresses, signal_addresses, steps_ptr, half_bytes, rank,
    SIZE: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, UNIT_OFFSET: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (rows < num_rows) & (columns < HIDDEN)[None, :]
    offsets = rows * HIDDEN + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    residual_tile = residual_ptr + rows.to(tl.int64) * stride_residual + columns[None, :]
    residual = tl.load(residual_tile, mask=mask, other=0.0).to(tl.float32)
    total = _sum_over_ranks(
        tl.load(x_ptr + offsets, mask=mask), offsets, mask, dtype,
        buffer_addresses, signal_addresses, steps_ptr, half_bytes, rank, SIZE, MAX_BLOCKS,
    )  # fmt: skip
    total += residual
    total = rounded(total, dtype)
    tl.store(residual_tile, total, mask=mask)
    y = normed_rows(total.to(tl.float32), weight[None, :], eps, dtype, HIDDEN, UNIT_OFFSET)
    tl.store(y_ptr + offsets, rounded(y, dtype), mask=mask)


class OneShotAllReduce:
    """One rank of a group. `buffers`, `signals`: the memory of all ranks, in their order, as this rank
    addresses it; `buffers` of 2 * half_bytes bytes at addresses that are multiples of 16, `signals` int32
    zeros of [MAX_BLOCKS, size]."""

    dtypes = DTYPES
    memory: object = None  # of which buffers and signals are views

    def __init__(self, buffers: Sequence[torch.Tensor], signals: Sequence[torch.Tensor], rank: int) -> None:
        self.rank, self.size = rank, len(buffers)
        self.half_bytes = buffers[rank].numel() // 2
        device = buffers[rank].device
        self._memory = (buffers, signals)  # kept alive
        steps = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
        addresses = [[x.data_ptr() for x in each] for each in self._memory]
        self._state = (*torch.tensor(addresses, device=device), steps, self.half_bytes, rank)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in x's shape and dtype. x: contiguous, one of DTYPES, at most half_bytes. All
        ranks call this object with the same shapes and dtypes in the same order, on one stream each."""
        self._check(x)
        y = torch.empty_like(x)
        if x.numel() > 0:
            _one_shot_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x, y, x.numel(), *self._state,
                BLOCK=BLOCK, SIZE=self.size, MAX_BLOCKS=MAX_BLOCKS, num_warps=1 if INTERPRETED else 8,
                **pdl_options(x),
            )  # fmt: skip
        return y

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_rms_norm` (rms_norm.py) of the sum over ranks, rounded once: after the residual is added.
        x [num_tokens, hidden_size] as above, written over like residual, which is rows of one stride."""
        self._check(x)
        num_rows, hidden_size = x.shape
        assert residual.shape == x.shape
        assert residual.dtype == x.dtype
        assert residual.stride(1) == 1 or hidden_size == 1
        block, tile_rows, num_warps = tile_of_rows(hidden_size)
        rows = interpreted_rows(num_rows) or tile_rows
        if num_rows > 0:
            _one_shot_norm_kernel[(triton.cdiv(num_rows, rows),)](
                x, residual, x, weight, num_rows, eps, residual.stride(0), *self._state,
                SIZE=self.size, HIDDEN=hidden_size, BLOCK=block, ROWS=rows, MAX_BLOCKS=MAX_BLOCKS,
                UNIT_OFFSET=unit_offset, num_warps=num_warps, **pdl_options(x),
            )  # fmt: skip
        return x, residual

    def _check(self, x: torch.Tensor) -> None:
        num_bytes = x.numel() * x.element_size()
        assert x.is_contiguous()
        assert x.dtype in DTYPES
        assert num_bytes <= self.half_bytes, f"{num_bytes} bytes; the buffers have {self.half_bytes}"
