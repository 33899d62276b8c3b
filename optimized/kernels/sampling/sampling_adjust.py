"""Penalties, masks and bias, applied to a copy of the logits. Only for batches that use them.

Roofline bound: one read of the logits and of every tensor given (counts 4, masks 1, bias 4 bytes a token),
one write.

Shape: a CTA takes a tile of whole rows if they are short, else a piece of one row. Later passes read the
copy as if it were the model's output; a NaN stays NaN even where its token is banned, so that they find it.
Multiplications and subtractions round one by one (no fused multiply-add), as in the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.shared.types import SamplingBatchInfo

TILE = 4096
INTERPRETED_TILE = 65536
PARAMETERS = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "is_greedy")
GIVEN = {
    "output_counts": torch.int32,
    "prompt_mask": torch.bool,
    "frequency_penalties": torch.float32,
    "presence_penalties": torch.float32,
    "repetition_penalties": torch.float32,
    "vocab_mask": torch.int32,
    "banned": torch.bool,
    "logit_bias": torch.float32,
}
"""Tensors of `SamplingBatchInfo`, in the order of the kernel's arguments."""
ADJUSTMENTS = ("logit_bias", "banned", "vocab_mask", "output_counts")


@triton.jit(
    do_not_specialize=["num_rows", "mask_stride", "given"],
    do_not_specialize_on_alignment=["frequency_ptr", "presence_ptr", "repetition_ptr"],
)
def _adjust_kernel(
    logits_ptr, out_ptr, counts_ptr, prompt_ptr, frequency_ptr, presence_ptr, repetition_ptr,
    mask_ptr, banned_ptr, bias_ptr, row_stride, out_stride, mask_stride, num_rows, vocab_size, given,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """given: bit i is set if GIVEN[i] is. An argument and no constant, or each of 255 combinations would be a
    kernel that is compiled when the first request asks for it."""
    num_pieces = tl.cdiv(vocab_size, COLUMNS)
    rows = (tl.program_id(0) // num_pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ids = tl.program_id(0) % num_pieces * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    inside = is_row[:, None] & (ids < vocab_size)[None, :]
    at = rows[:, None] * vocab_size + ids[None, :]
    raw = tl.load(logits_ptr + rows[:, None] * row_stride + ids[None, :], mask=inside).to(tl.float32)
    x = raw
    if given & 1:
        counts = tl.load(counts_ptr + at, mask=inside, other=0)
        if given & 16:
            seen = counts > 0
            if given & 2:
                seen |= tl.load(prompt_ptr + at, mask=inside, other=0).to(tl.int1)
            penalty = tl.load(repetition_ptr + rows, mask=is_row, other=1.0)[:, None]
            x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
        if given & 4:
            x -= tl.load(frequency_ptr + rows, mask=is_row, other=0.0)[:, None] * counts.to(tl.float32)
        if given & 8:
            x -= tl.where(counts > 0, tl.load(presence_ptr + rows, mask=is_row, other=0.0)[:, None], 0.0)
    if given & 32:
        words = tl.load(mask_ptr + rows[:, None] * mask_stride + ids[None, :] // 32, mask=inside, other=0)
        x = tl.where(((words >> (ids % 32)[None, :]) & 1) == 0, float("-inf"), x)
    if given & 64:
        x = tl.where(tl.load(banned_ptr + at, mask=inside, other=0).to(tl.int1), float("-inf"), x)
    if given & 128:
        x += tl.load(bias_ptr + at, mask=inside, other=0.0)
    out_at = rows[:, None] * out_stride + ids[None, :]
    tl.store(out_ptr + out_at, tl.where(raw != raw, raw, x), mask=inside)


def dense(info: SamplingBatchInfo) -> SamplingBatchInfo:
    """The rows' parameters as kernels read them: one after the other in memory."""
    given = {name: getattr(info, name) for name in PARAMETERS}
    if all(value.is_contiguous() for value in given.values()):
        return info
    return replace(info, **{name: value.contiguous() for name, value in given.items()})


def empty_rows(logits: torch.Tensor) -> torch.Tensor:
    """Uninitialized float32 for changed logits [bs, vocab_size], with the row stride of `logits`. Triton
    chooses the layout of a tile by it, and so the order of sums. With one stride, the log-probabilities of a
    row have the same bits whether or not another row is changed."""
    num_rows, vocab_size = logits.shape
    row_size = max(logits.stride(0), vocab_size)
    return torch.empty(num_rows, row_size, dtype=torch.float32, device=logits.device)[:, :vocab_size]


def adjust(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """[bs, vocab_size], any strides -> float32, dense in the last dimension: the logits themselves where
    `info` changes none of them."""
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        logits = logits.float().contiguous()
    if all(getattr(info, name) is None for name in ADJUSTMENTS) or logits.numel() == 0:
        return logits
    num_rows, vocab_size = logits.shape
    tile = INTERPRETED_TILE if INTERPRETED else TILE
    columns = min(triton.next_power_of_2(vocab_size), tile)
    rows = tile // columns
    tensors, given = [], 0
    for bit, (name, dtype) in enumerate(GIVEN.items()):
        tensor = getattr(info, name)
        given |= (tensor is not None) << bit
        tensors.append(logits.view(dtype) if tensor is None else tensor.contiguous())
    out = empty_rows(logits)
    grid = (triton.cdiv(num_rows, rows) * triton.cdiv(vocab_size, columns),)
    _adjust_kernel[grid](
        logits, out, *tensors, logits.stride(0), out.stride(0), tensors[5].stride(0), num_rows, vocab_size,
        given, ROWS=rows, COLUMNS=columns, enable_fp_fusion=False,
    )  # fmt: skip
    return out
