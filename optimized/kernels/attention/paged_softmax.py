"""Device functions that paged attention kernels share: slots, scores, and one step of an online softmax.

An online softmax keeps for each query row the largest score so far, the sum of exp2(score - largest) and the
values weighted likewise; a larger score rescales both. Scores are in units of log 2, so that exp2, which is
one instruction, takes the place of exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED, rounded
from diptych.shared.types.attention import AttentionLayer

_INTERPRETED = tl.constexpr(INTERPRETED)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def slots_at(row_ptr, positions, PAGE_SIZE: tl.constexpr):
    """int64 slots of a request's positions. The slots of a page are consecutive, so one entry of the row
    determines them, and all lanes of a page read the same address."""
    if PAGE_SIZE == 1:
        slots = tl.load(row_ptr + positions)
    else:
        in_page = positions % PAGE_SIZE
        slots = tl.load(row_ptr + (positions - in_page)) + in_page
    return slots.to(tl.int64)


@triton.jit
def first_visible(position, window):
    """The first key that the token at a position sees. window as from `window_of`."""
    position = tl.maximum(position, 0)  # an entry without tokens has -1
    chunk = tl.maximum(-window, 1)
    return tl.where(window >= 0, tl.maximum(position - window, 0), position // chunk * chunk)


def window_of(layer: AttentionLayer) -> int:
    """A layer's sliding window; -1: none; below: minus the length of its chunks."""
    if layer.attention_chunk == 0:
        return layer.sliding_window
    assert layer.sliding_window < 0, "chunks and a sliding window"
    return 0 if layer.attention_chunk == 1 else -layer.attention_chunk


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. The interpreter cannot multiply bfloat16."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def capped(products, scale, logit_cap, HAS_CAP: tl.constexpr):
    """q · k -> log2(e) * its score."""
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): saturates at both ends without overflow.
        doubled = products * (2 * LOG2_E * scale / logit_cap)
        return (LOG2_E * logit_cap) * (1 - 2 / (1 + tl.exp2(doubled)))
    else:
        return products * (LOG2_E * scale)


@triton.jit
def scores_of(q, k, scale, logit_cap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """log2(e) * the scores of q · kᵀ, float32."""
    return capped(dot(q, tl.trans(k), PRECISION), scale, logit_cap, HAS_CAP)


@triton.jit
def accumulate(acc, largest, total, scores, v, PRECISION: tl.constexpr):
    """One step: scores [rows, keys] (-inf where masked) and v [keys, head_dim] join the running softmax.
    total is [rows], or [rows, keys], to be summed at the end: where warps share a row, that spares barriers.

    A row without visible keys keeps -inf as its maximum; 0 is subtracted instead, because -inf - -inf is NaN.
    A NaN score makes its row's total NaN for any maximum, which reaches the output.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(largest - base)
    if len(total.shape) == 2:
        total = total * rescale[:, None] + weights
    else:
        total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None] + dot(rounded(weights, v.dtype), v, PRECISION)
    return acc, new_largest, total
