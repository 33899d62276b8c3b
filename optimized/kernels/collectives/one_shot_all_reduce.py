"""Sum over the ranks of one computer in one launch, alone or fused with residual sum and RMSNorm; and, by the
same messages, all-gather and reduce-scatter, where a rank sends each peer all of its rows, or the peer's.

Roofline bound: 2 * (size - 1) * n * itemsize bytes written over NVLink, for few of them the time of a write
to a peer. Loses to ring sums for large n: data travels with its flags, which doubles it, and to every peer.

A launch is one step of all ranks. A block of it

1. writes its part of the input into the inboxes of all other ranks, as words of 8 bytes: 4 bytes of data and
   the step's number. A write of 8 aligned bytes arrives whole, so no fence and no other signal is needed;
2. reads the words of the others in its own inbox until all have this step's number;
3. adds in float32 in the order of ranks: the same bits everywhere.

An inbox has two halves, and the parity of the step says which one is used. A half is written again two steps
later. Then this rank has received words of the step between from all others, and a rank sends these after it
has ended this step. It does not matter which blocks a launch has. All launches of a rank must run one after
the other. All state is in device memory: replays of a CUDA graph go on counting. Steps wrap around after
2^32; words that no launch has written since would then count as arrived.

Tested in Triton's interpreter, between processes that share memory. docs/parallel.md says what has run
between two GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.linear.rms_norm import normed_rows, tile_of_rows
from diptych.optimized.kernels.portable import INTERPRETED, interpreted_rows, pdl_options, rounded

BLOCK = 512
"""Elements of a block of a sum alone."""
MAX_BLOCKS = 4096
"""Of a launch: 4 MB of a sum alone, or in tiles of rows (rms_norm.py), which are at least half full."""
COUNTERS = tl.constexpr(512)
"""Of blocks, that a block writes at a time."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DATA_BYTES = 4
"""Of a word."""


@triton.jit
def _data_of(x, PER_WORD: tl.constexpr):
    """x [rows, columns] -> int32 [rows, columns / PER_WORD], the same bits."""
    if PER_WORD == 1:
        return x.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0], x.shape[1] // 2, 2]))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _values_of(data, dtype: tl.constexpr, PER_WORD: tl.constexpr):
    """The inverse of `_data_of`, in float32."""
    if PER_WORD == 1:
        return data.to(tl.float32, bitcast=True)
    else:
        pairs = tl.join(data.to(tl.int16), (data >> 16).to(tl.int16))
        values = tl.reshape(pairs, [data.shape[0], data.shape[1] * 2])
        return values.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _next_step(steps_ptr, SIZE: tl.constexpr):
    """The step of this block, as the upper half of a word, and the first message of its half of an inbox."""
    step = tl.load(steps_ptr + tl.program_id(0)) + 1
    return step, step.to(tl.int64) << 32, (step & 1) * SIZE


@triton.jit
def _received(place, mask, step, number):
    """The data of words, when all of them are of this step."""
    received = tl.load(place, mask=mask, other=number, volatile=True)
    while tl.max((received >> 32 != step).to(tl.int32)) > 0:
        received = tl.load(place, mask=mask, other=number, volatile=True)
    return received.to(tl.int32)


@triton.jit
def _end_step(steps_ptr, step, MAX_BLOCKS: tl.constexpr):
    """Counters go on: this block's, which no other reads, and a part of those of blocks that are not here."""
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    tl.store(steps_ptr + block, step)
    share = (MAX_BLOCKS - 1) // num_blocks
    first = num_blocks + block * share
    others = tl.arange(0, COUNTERS)
    for start in range(first, first + share, COUNTERS):
        exist = start + others < tl.minimum(first + share, MAX_BLOCKS)
        tl.store(steps_ptr + start + others, tl.zeros_like(others) + step, mask=exist)


@triton.jit
def _sum_over_ranks(
    x, words, mask, inboxes, steps_ptr, capacity,
    RANK: tl.constexpr, SIZE: tl.constexpr, PER_WORD: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """x: a tile of this rank's input, [rows, columns]. words, mask: where its words are in a message, and
    which exist, [rows, columns / PER_WORD]. capacity: words of a message -> the float32 sum of that tile."""
    step, number, half = _next_step(steps_ptr, SIZE)
    message = number | (_data_of(x, PER_WORD).to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(inboxes[peer] + (half + RANK) * capacity + words, message, mask=mask)

    total = tl.zeros(x.shape, tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            part = x.to(tl.float32)
        else:
            data = _received(inboxes[RANK] + (half + peer) * capacity + words, mask, step, number)
            part = _values_of(data, x.dtype, PER_WORD)
        total += part
    _end_step(steps_ptr, step, MAX_BLOCKS)
    return total


@triton.jit
def _one_shot_kernel(
    x_ptr, y_ptr, n, num_words, inboxes, steps_ptr, capacity,
    BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PER_WORD: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    offsets = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    words = (tl.program_id(0) * (BLOCK // PER_WORD) + tl.arange(0, BLOCK // PER_WORD))[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = _sum_over_ranks(
        tl.load(x_ptr + offsets, mask=offsets < n, other=0.0), words, words < num_words,
        inboxes, steps_ptr, capacity, RANK, SIZE, PER_WORD, MAX_BLOCKS,
    )  # fmt: skip
    tl.store(y_ptr + offsets, rounded(total, dtype), mask=offsets < n)


@triton.jit(do_not_specialize=["num_rows"])
def _one_shot_norm_kernel(
    x_ptr, residual_ptr, y_ptr, weight_ptr, num_rows, eps, stride_residual, inboxes, steps_ptr, capacity,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PER_WORD: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, UNIT_OFFSET: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    columns, word_columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK // PER_WORD)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (rows < num_rows) & (columns < HIDDEN)[None, :]
    offsets = rows * HIDDEN + columns[None, :]
    words = rows * (HIDDEN // PER_WORD) + word_columns[None, :]
    word_mask = (rows < num_rows) & (word_columns < HIDDEN // PER_WORD)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    residual_tile = residual_ptr + rows.to(tl.int64) * stride_residual + columns[None, :]
    residual = tl.load(residual_tile, mask=mask, other=0.0).to(tl.float32)
    total = _sum_over_ranks(
        tl.load(x_ptr + offsets, mask=mask, other=0.0), words, word_mask,
        inboxes, steps_ptr, capacity, RANK, SIZE, PER_WORD, MAX_BLOCKS,
    )  # fmt: skip
    total += residual
    total = rounded(total, dtype)
    tl.store(residual_tile, total, mask=mask)
    y = normed_rows(total.to(tl.float32), weight[None, :], eps, dtype, HIDDEN, UNIT_OFFSET)
    tl.store(y_ptr + offsets, rounded(y, dtype), mask=mask)


@triton.jit
def _one_shot_gather_kernel(
    x_ptr, y_ptr, n, inboxes, steps_ptr, capacity,
    BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = words < n
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step, number, half = _next_step(steps_ptr, SIZE)
    own = tl.load(x_ptr + words, mask=mask, other=0)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            place = inboxes[peer] + (half + RANK) * capacity + words
            tl.store(place, number | (own.to(tl.int64) & 0xFFFFFFFF), mask=mask)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            data = own
        else:
            data = _received(inboxes[RANK] + (half + peer) * capacity + words, mask, step, number)
        tl.store(y_ptr + peer * n + words, data, mask=mask)
    _end_step(steps_ptr, step, MAX_BLOCKS)


@triton.jit
def _one_shot_scatter_kernel(
    x_ptr, y_ptr, n, num_words, inboxes, steps_ptr, capacity,
    BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PER_WORD: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    offsets = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    words = (tl.program_id(0) * (BLOCK // PER_WORD) + tl.arange(0, BLOCK // PER_WORD))[None, :]
    mask = offsets < n
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step, number, half = _next_step(steps_ptr, SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            data = _data_of(tl.load(x_ptr + peer * n + offsets, mask=mask, other=0.0), PER_WORD)
            place = inboxes[peer] + (half + RANK) * capacity + words
            tl.store(place, number | (data.to(tl.int64) & 0xFFFFFFFF), mask=words < num_words)
    sum_of_parts = tl.zeros([1, BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            values = tl.load(x_ptr + RANK * n + offsets, mask=mask, other=0.0).to(tl.float32)
        else:
            place = inboxes[RANK] + (half + peer) * capacity + words
            values = _values_of(_received(place, words < num_words, step, number), dtype, PER_WORD)
        sum_of_parts += values
    _end_step(steps_ptr, step, MAX_BLOCKS)
    tl.store(y_ptr + offsets, rounded(sum_of_parts, dtype), mask=mask)


class OneShotAllReduce:
    """One rank of a group. `inboxes`: the memory of all ranks, in their order, as this rank addresses it;
    each int64 zeros [2, size, num_words] at an address that is a multiple of 16: halves, senders, words."""

    dtypes = DTYPES
    memory: object = None  # of which inboxes are views

    def __init__(self, inboxes: Sequence[torch.Tensor], rank: int) -> None:
        self.rank, self.size = rank, len(inboxes)
        self.max_bytes = inboxes[rank].shape[2] * DATA_BYTES
        self._steps = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=inboxes[rank].device)
        self._state = (tuple(inboxes), self._steps, inboxes[rank].shape[2])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in x's shape and dtype. x: contiguous, one of DTYPES, at most max_bytes. All
        ranks call this object with the same shapes and dtypes in the same order, on one stream each."""
        options = self._options(x)
        y = torch.empty_like(x)
        if x.numel() > 0:
            _one_shot_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x, y, x.numel(), triton.cdiv(x.numel(), options["PER_WORD"]), *self._state,
                BLOCK=BLOCK, num_warps=1 if INTERPRETED else 4, **options,
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
        x [num_tokens, hidden_size] as above, rows of whole words, written over like residual, which is rows
        of one stride."""
        options = self._options(x)
        num_rows, hidden_size = x.shape
        assert hidden_size % options["PER_WORD"] == 0
        assert residual.shape == x.shape
        assert residual.dtype == x.dtype
        assert residual.stride(1) == 1 or hidden_size == 1
        block, tile_rows, num_warps = tile_of_rows(hidden_size)
        rows = interpreted_rows(num_rows) or tile_rows
        if num_rows > 0:
            _one_shot_norm_kernel[(triton.cdiv(num_rows, rows),)](
                x, residual, x, weight, num_rows, eps, residual.stride(0), *self._state,
                HIDDEN=hidden_size, BLOCK=block, ROWS=rows, UNIT_OFFSET=unit_offset, num_warps=num_warps,
                **options,
            )  # fmt: skip
        return x, residual

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] int32, contiguous, at most max_bytes -> [size * n, ...]: those of all ranks."""
        assert x.dtype == torch.int32
        y = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if x.numel() > 0:
            options = self._options(x.view(torch.float32))  # words
            del options["PER_WORD"]
            _one_shot_gather_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x, y, x.numel(), *self._state, BLOCK=BLOCK, num_warps=1 if INTERPRETED else 4, **options
            )
        return y

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] -> [n, ...]: this rank's part of the sum over ranks. x: as above, but each part has
        at most max_bytes."""
        y = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        if y.numel() > 0:
            options = self._options(x, y.numel())
            _one_shot_scatter_kernel[(triton.cdiv(y.numel(), BLOCK),)](
                x, y, y.numel(), triton.cdiv(y.numel(), options["PER_WORD"]), *self._state,
                BLOCK=BLOCK, num_warps=1 if INTERPRETED else 4, **options,
            )  # fmt: skip
        return y

    def _options(self, x: torch.Tensor, num: int | None = None) -> dict[str, Any]:
        """num: elements of a message; None: all."""
        num_bytes = (x.numel() if num is None else num) * x.element_size()
        assert x.is_contiguous()
        assert x.dtype in DTYPES
        assert num_bytes <= self.max_bytes, f"{num_bytes} bytes; a message has {self.max_bytes}"
        per_word = DATA_BYTES // x.element_size()
        sizes = {"RANK": self.rank, "SIZE": self.size, "PER_WORD": per_word, "MAX_BLOCKS": MAX_BLOCKS}
        return sizes | pdl_options(x)
