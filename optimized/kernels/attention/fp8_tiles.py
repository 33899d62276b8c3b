"""Tiles of 32 keys of an FP8 pool in the registers of one warp, for fp8_decode_attention.py.

The query heads of a KV head, at most eight, are the columns of B. In `scores` the keys are the rows of A, and
a lane has 32 of the 128 bytes of a key. In `add_values` the dimensions of V are the rows of A, and its words
hold two keys each, so the bytes of two keys are interleaved before they are widened. g, t and the places of
values are explained in warp_mma.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.optimized.kernels.attention.paged_softmax import capped, slots_at
from diptych.optimized.kernels.portable import INTERPRETED, largest_or_nan
from diptych.optimized.kernels.warp_mma import (
    e4m3_byte,
    float16_words,
    four,
    from_lane,
    halves_of,
    mma,
    pairs,
    transposed,
    widened_e4m3_words,
)

_INTERPRETED = tl.constexpr(INTERPRETED)
HEAD_DIM: tl.constexpr = tl.constexpr(128)
TILE: tl.constexpr = tl.constexpr(32)
"""Keys of a warp."""

_INTERLEAVE = tl.constexpr("""{
    .reg .b32 word;
    .reg .b16 low, high;
    prmt.b32 word, $4, $5, 0x5140;
    mov.b32 {low, high}, word;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    prmt.b32 word, $4, $5, 0x7362;
    mov.b32 {low, high}, word;
    cvt.rn.f16x2.e4m3x2 $2, low;
    cvt.rn.f16x2.e4m3x2 $3, high;
}""")


@triton.jit
def load_slots(slots_ptr, start, seq_len, first_key, WARPS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The slots of a tile, one in each lane. Beyond the ends the nearest key's: its score is masked."""
    positions = start + tl.arange(0, WARPS)[None, :] * TILE + tl.arange(0, 32)[:, None]
    nearest = tl.maximum(tl.minimum(positions, seq_len - 1), first_key)
    return slots_at(slots_ptr, nearest, PAGE_SIZE).to(tl.int32)


@triton.jit
def _rows_of(base, slots, source, STRIDE: tl.constexpr, WARPS: tl.constexpr):
    """[32, WARPS, 1] pointers to the rows of the keys whose slots the lanes `source` have."""
    lane = source[:, None] + tl.arange(0, WARPS)[None, :] * 0
    return base + (from_lane(slots, lane, WARPS).to(tl.int64) * STRIDE)[:, :, None]


@triton.jit
def load_keys(k_head, slots, mask, STRIDE: tl.constexpr, WARPS: tl.constexpr):
    """Load bytes 16 t and on, and 64 + 16 t and on, of the keys g, g + 8, g + 16 and g + 24."""
    lanes = tl.arange(0, 32)
    columns = (lanes % 4 * 4)[:, None, None] + tl.arange(0, 4)[None, None, :]
    words = ()
    for i in tl.static_range(4):
        rows = _rows_of(k_head, slots, lanes // 4 + 8 * i, STRIDE, WARPS) + columns
        words += (tl.load(rows, mask=mask, other=0), tl.load(rows + 16, mask=mask, other=0))
    return words


@triton.jit
def load_values(v_head, slots, mask, STRIDE: tl.constexpr, WARPS: tl.constexpr):
    """Load bytes 16 g and on of the keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 and those 16 later."""
    lanes = tl.arange(0, 32)
    columns = (lanes // 4 * 4)[:, None, None] + tl.arange(0, 4)[None, None, :]
    words = ()
    for i in tl.static_range(8):
        rows = _rows_of(v_head, slots, lanes % 4 * 2 + i // 2 * 8 + i % 2, STRIDE, WARPS)
        words += (tl.load(rows + columns, mask=mask, other=0),)
    return words


@triton.jit
def load_q(q_ptr, stride_head, GROUP: tl.constexpr, WARPS: tl.constexpr):
    """Words of B of a request's heads, column g, and the power of two [WARPS] by which they are divided: K
    becomes float16 in one instruction for two values, and bfloat16 in seven. That is exact except for values
    2^14 times smaller than the largest."""
    lanes, warps = tl.arange(0, 32), tl.arange(0, WARPS)
    columns = (lanes // 4 * stride_head + lanes % 4 * 16)[:, None, None] + tl.arange(0, 8)[None, None, :]
    columns += (warps * 0)[None, :, None]
    mask = (lanes // 4 < GROUP)[:, None, None] & (columns >= 0)
    loaded = ()
    largest = tl.zeros([32, WARPS], tl.float32)
    for i in tl.static_range(4):
        loaded += (tl.load(q_ptr + columns + (i // 2 * 64 + i % 2 * 8), mask=mask, other=0.0),)
        of_lane = largest_or_nan(tl.abs(loaded[i].to(tl.float32)), 2)
        largest = tl.maximum(largest, of_lane, propagate_nan=tl.PropagateNan.ALL)
    exponent = largest_or_nan(largest, 0).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))
    words = ()
    for i in tl.static_range(4):
        words += pairs((loaded[i].to(tl.float32) * (1.0 / power)[None, :, None]).to(tl.float16), WARPS)
    return words, power


@triton.jit
def scores(
    k, q, power, start, seq_len, first_key, scale, logit_cap, HAS_CAP: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """log2(e) * the scores of a tile, -inf where a key is not visible: for the keys g, g + 8, g + 16 and
    g + 24 those of the heads 2 t and 2 t + 1."""
    positions = start + tl.arange(0, WARPS)[None, :] * TILE + (tl.arange(0, 32) // 4)[:, None]
    zero = tl.zeros([32, WARPS], tl.float32)
    found = ()
    for block in tl.static_range(2):
        # Two sums, so that half as many instructions wait for each other.
        c, d = (zero, zero, zero, zero), (zero, zero, zero, zero)
        for half in tl.static_range(2):
            upper, lower = four(k[4 * block + half], WARPS), four(k[4 * block + 2 + half], WARPS)
            for j in tl.static_range(4):
                a0, a2 = widened_e4m3_words(upper[j])
                a1, a3 = widened_e4m3_words(lower[j])
                b = q[8 * half + 2 * j], q[8 * half + 2 * j + 1]
                if half == 0:
                    c = mma((a0, a1, a2, a3), b, c, WARPS)
                else:
                    d = mma((a0, a1, a2, a3), b, d, WARPS)
        for i in tl.static_range(4):
            score = capped(c[i] + d[i], scale * power[None, :], logit_cap, HAS_CAP)
            position = positions + (16 * block + i // 2 * 8)
            found += (tl.where((position < seq_len) & (position >= first_key), score, float("-inf")),)
    return found


@triton.jit
def _interleaved(first, second):
    """Words of four e4m3 of two keys -> four words of float16: both keys' value 0, then 1, 2, 3."""
    if _INTERPRETED:
        found = ()
        for i in tl.static_range(4):
            found += (halves_of(e4m3_byte(first, i), e4m3_byte(second, i)),)
        return found
    else:
        return tl.inline_asm_elementwise(
            _INTERLEAVE, "=&r,=&r,=&r,=&r,r,r", [first, second],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def add_values(acc, v, weights, WARPS: tl.constexpr):
    """acc + weights · v. acc: for m from 0 to 7, dimension 16 g + 2 m of the heads 2 t and 2 t + 1, then
    dimension 16 g + 2 m + 1. weights: as scores."""
    for block in tl.static_range(2):
        w0, w1, w2, w3 = (
            weights[4 * block],
            weights[4 * block + 1],
            weights[4 * block + 2],
            weights[4 * block + 3],
        )
        b0 = transposed(float16_words(w0, w1), WARPS)
        b1 = transposed(float16_words(w2, w3), WARPS)
        v0, v1 = four(v[4 * block], WARPS), four(v[4 * block + 1], WARPS)
        v2, v3 = four(v[4 * block + 2], WARPS), four(v[4 * block + 3], WARPS)
        added = ()
        for j in tl.static_range(4):
            x, y = _interleaved(v0[j], v1[j]), _interleaved(v2[j], v3[j])
            for i in tl.static_range(2):
                a = x[2 * i], x[2 * i + 1], y[2 * i], y[2 * i + 1]
                first = (acc[8 * j + 4 * i], acc[8 * j + 4 * i + 1])
                second = (acc[8 * j + 4 * i + 2], acc[8 * j + 4 * i + 3])
                added += mma(a, (b0, b1), first + second, WARPS)
        acc = added
    return acc


@triton.jit
def over_keys(x, WARPS: tl.constexpr):
    """The maximum over the lanes of the same t, in each of them."""
    largest = tl.max(tl.reshape(x, (8, 4, WARPS)), 0)
    return tl.reshape(tl.broadcast_to(largest[None, :, :], (8, 4, WARPS)), (32, WARPS))


@triton.jit
def whole(acc, largest, total, WARPS: tl.constexpr):
    """Merge what the lanes and warps have: outputs [8 heads, HEAD_DIM], not normalised, the largest score
    and the sum of weights [8]. largest and total: of the heads 2 t and 2 t + 1."""
    top0, top1 = tl.max(largest[0], 1)[:, None], tl.max(largest[1], 1)[:, None]
    factor0 = tl.exp2(largest[0] - tl.where(top0 == float("-inf"), 0.0, top0))
    factor1 = tl.exp2(largest[1] - tl.where(top1 == float("-inf"), 0.0, top1))
    columns = ()
    for m in tl.static_range(8):
        even = tl.join(acc[4 * m] * factor0, acc[4 * m + 2] * factor0)
        odd = tl.join(acc[4 * m + 1] * factor1, acc[4 * m + 3] * factor1)
        columns += (tl.join(even, odd),)  # [32, WARPS, dimension, head]
    quarters = ()
    for m in tl.static_range(4):
        quarters += (tl.join(columns[m], columns[m + 4]),)
    joined = tl.join(tl.join(quarters[0], quarters[2]), tl.join(quarters[1], quarters[3]))
    outputs = tl.reshape(tl.sum(joined, 1), (8, 4, 2, 2, 8))  # g, t, dimension, head, m
    outputs = tl.reshape(tl.permute(outputs, (1, 3, 0, 4, 2)), (8, HEAD_DIM))
    even, odd = tl.reshape(total[0] * factor0, (8, 4, WARPS)), tl.reshape(total[1] * factor1, (8, 4, WARPS))
    sums = tl.join(tl.sum(tl.sum(even, 2), 0), tl.sum(tl.sum(odd, 2), 0))
    most = tl.join(_top(largest[0], WARPS), _top(largest[1], WARPS))
    return outputs, tl.reshape(most, (8,)), tl.reshape(sums, (8,))


@triton.jit
def _top(largest, WARPS: tl.constexpr):
    return tl.max(tl.max(tl.reshape(largest, (8, 4, WARPS)), 2), 0)
