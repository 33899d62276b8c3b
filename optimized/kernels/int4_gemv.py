"""One token times INT4 weights, for quantized_gemv.py: nibbles become 16-bit values in registers, and the
tensor cores multiply them.

Roofline bound: the weights' bytes, out_features * in_features / 2, and 4 bytes for each scale, over the
memory bandwidth.

Shape: a CTA computes ROWS outputs, and each of its warps a part of every row: runs of 64 bytes, 16 bytes in
each of four lanes, the first of them loaded before it waits for the previous kernel. With g = lane // 4 and
t = lane % 4, a lane has the rows g, g + 8 and so on, and `mma.sync` (warp_mma.py) adds its inputs to those of
the other lanes of g. The columns of B are all the same token. On CUDA cores the multiplications alone take
more instructions than there is time for while weights arrive (docs/lab/decode-batch-1.md).

A nibble n as the upper bits of the mantissa of 16 is the number 16 + n. So the sum over (n - zero) * x is
that over (16 + n) * x, less 16 + zero times the sum of x, which is one more row of ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from optimized.kernels.portable import INTERPRETED, rounded
from optimized.kernels.warp_mma import halves_of, mma
from shared.types.quantization import INT4_ZERO

_ZERO = tl.constexpr(INT4_ZERO)
_INTERPRETED = tl.constexpr(INTERPRETED)
_OFFSET = tl.constexpr(16.0)

_NIBBLES = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    shl.b32 a, $4, 3;
    shr.b32 b, $4, 1;
    shr.b32 c, $4, 5;
    shr.b32 d, $4, 9;
    lop3.b32 $0, a, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 $1, b, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 $2, c, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 $3, d, 0x00780078, 0x41804180, 0xEA;
}""")
_NIBBLES_F16 = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    shl.b32 a, $4, 6;
    shl.b32 b, $4, 2;
    shr.b32 c, $4, 2;
    shr.b32 d, $4, 6;
    lop3.b32 $0, a, 0x03C003C0, 0x4C004C00, 0xEA;
    lop3.b32 $1, b, 0x03C003C0, 0x4C004C00, 0xEA;
    lop3.b32 $2, c, 0x03C003C0, 0x4C004C00, 0xEA;
    lop3.b32 $3, d, 0x03C003C0, 0x4C004C00, 0xEA;
}""")


@triton.jit
def _threads(WARPS: tl.constexpr):
    """The lane and the warp of each thread of the CTA, [32 * WARPS]. Any order serves the interpreter; its
    warp_mma has lanes first."""
    threads = tl.arange(0, 32 * WARPS)
    if _INTERPRETED:
        return threads // WARPS, threads % WARPS
    else:
        return threads % 32, threads // 32


@triton.jit
def _four(x, WARPS: tl.constexpr):
    """x [32 * WARPS, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(x, (32 * WARPS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _values(words, dtype: tl.constexpr):
    """Words of eight nibbles n -> four words of two values 16 + n: nibbles 0 and 4, 1 and 5, 2 and 6, 3 and
    7."""
    if _INTERPRETED:
        found = ()
        for i in tl.static_range(4):
            low, high = (words >> (4 * i)) & 15, (words >> (4 * i + 16)) & 15
            found += (halves_of((low + _OFFSET).to(dtype), (high + _OFFSET).to(dtype)),)
        return found
    else:
        return tl.inline_asm_elementwise(
            _NIBBLES if dtype == tl.bfloat16 else _NIBBLES_F16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _even_and_odd(first, second):
    """Words of the inputs 0 and 1, 2 and 3 -> words of 0 and 2, 1 and 3."""
    if _INTERPRETED:
        return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;", "=&r,=&r,r,r", [first, second],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _mma(a, b, c, dtype: tl.constexpr, WARPS: tl.constexpr):
    if _INTERPRETED:
        words, columns, sums, found = (), (), (), ()
        for i in tl.static_range(4):
            words += (tl.reshape(a[i], (32, WARPS)),)
            sums += (tl.reshape(c[i], (32, WARPS)),)
        for i in tl.static_range(2):
            columns += (tl.reshape(b[i], (32, WARPS)),)
        sums = mma(words, columns, sums, WARPS, dtype)
        for i in tl.static_range(4):
            found += (tl.reshape(sums[i], (32 * WARPS,)),)
        return found
    else:
        return mma(a, b, c, WARPS, dtype)


@triton.jit
def _load_step(
    weight_ptr, scale_ptr, zero_ptr, first_row, run, g, t, stride_words, num_groups,
    OUT: tl.constexpr, RUNS: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr, HAS_ZERO: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Of each eighth row: 16 bytes [threads, 4], the scale and the zero point [threads]. Weights are read
    once, so they must not evict the input from the cache."""
    words, scales, zeros = (), (), ()
    group = run * 128 // UNIT
    for i in tl.static_range(ROWS // 8):
        row = first_row + 8 * i + g
        tile = weight_ptr + (row.to(tl.int64) * stride_words + run * 16 + t * 4)[:, None]
        tile += tl.arange(0, 4)[None, :]
        groups = row.to(tl.int64) * num_groups + group
        if MASKED:
            mask = (run < RUNS) & (row < OUT)
            tile_mask = mask[:, None] & (tl.arange(0, 4) >= 0)[None, :]
            words += (tl.load(tile, mask=tile_mask, other=0, eviction_policy="evict_first"),)
        else:
            mask = None
            words += (tl.load(tile, eviction_policy="evict_first"),)
        if GROUPED:
            scales += (tl.load(scale_ptr + groups, mask=mask, other=0.0 if MASKED else None),)
        if HAS_ZERO:
            zeros += (tl.load(zero_ptr + groups, mask=mask, other=0 if MASKED else None).to(tl.float32),)
    return words, scales, zeros


@triton.jit
def _load_inputs(
    x_ptr, run, t, RUNS: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr, WARPS: tl.constexpr
):
    """16 words of B for the 16 bytes of a lane: in fours, for the low and the high nibbles of four bytes. A
    byte's high nibble belongs to the input half a unit later. x_ptr: words of two inputs."""
    HALF: tl.constexpr = UNIT // 2
    byte = run * 64 + t * 16
    start = (byte // HALF * UNIT + byte % HALF) // 2
    low, high = (), ()
    for part in tl.static_range(4):
        words = x_ptr + (start + (part % 2 * 4 + part // 2 * (HALF // 2)))[:, None] + tl.arange(0, 4)[None, :]
        if MASKED:
            mask = (run < RUNS)[:, None] & (tl.arange(0, 4) >= 0)[None, :]
            w0, w1, w2, w3 = _four(tl.load(words, mask=mask, other=0), WARPS)
        else:
            w0, w1, w2, w3 = _four(tl.load(words), WARPS)
        pairs = (_even_and_odd(w0, w1), _even_and_odd(w2, w3))
        if part < 2:
            low += pairs
        else:
            high += pairs
    return low, high


@triton.jit
def int4_gemv_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, stride_words, num_groups,
    OUT: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr, HAS_ZERO: tl.constexpr,
    WARPS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = SIZE // 128
    STEPS: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    MASKED: tl.constexpr = RUNS % WARPS != 0 or OUT % ROWS != 0
    EIGHTS: tl.constexpr = ROWS // 8
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    ONES: tl.constexpr = 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00
    lane, warp = _threads(WARPS)
    g, t = lane // 4, lane % 4
    first_row = tl.program_id(0) * ROWS
    steps = ()
    for i in tl.static_range(min(AHEAD, STEPS)):
        steps += (_load_step(
            weight_ptr, scale_ptr, zero_ptr, first_row, warp * STEPS + i, g, t, stride_words, num_groups,
            OUT, RUNS, UNIT, GROUPED, HAS_ZERO, ROWS, MASKED,
        ),)  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    zero = tl.zeros([32 * WARPS], tl.float32)
    nothing = (zero, zero, zero, zero)
    one = tl.zeros([32 * WARPS], tl.int32) + ONES
    ones = (one, one, one, one)
    sums, totals = (), ()
    for _ in tl.static_range(EIGHTS // 2):
        sums += (nothing,)
        totals += (zero, zero)
    sum_x = nothing
    for step in tl.static_range(STEPS):
        if step + AHEAD < STEPS:
            steps += (_load_step(
                weight_ptr, scale_ptr, zero_ptr, first_row, warp * STEPS + step + AHEAD, g, t,
                stride_words, num_groups, OUT, RUNS, UNIT, GROUPED, HAS_ZERO, ROWS, MASKED,
            ),)  # fmt: skip
        words, scales, zeros = steps[step]
        low, high = _load_inputs(x_ptr, warp * STEPS + step, t, RUNS, UNIT, MASKED, WARPS)
        if GROUPED:
            sum_x = nothing
        for j in tl.static_range(4):
            sum_x = _mma(ones, low[j], sum_x, dtype, WARPS)
            sum_x = _mma(ones, high[j], sum_x, dtype, WARPS)
        new_sums, new_totals = (), ()
        for i in tl.static_range(EIGHTS // 2):
            upper, lower = _four(words[2 * i], WARPS), _four(words[2 * i + 1], WARPS)
            c = nothing if GROUPED else sums[i]
            for j in tl.static_range(4):
                u, v = _values(upper[j], dtype), _values(lower[j], dtype)
                c = _mma((u[0], v[0], u[2], v[2]), low[j], c, dtype, WARPS)
                c = _mma((u[1], v[1], u[3], v[3]), high[j], c, dtype, WARPS)
            new_sums += (c,)
            if GROUPED:
                for half in tl.static_range(2):
                    offset = _OFFSET + (zeros[2 * i + half] if HAS_ZERO else _ZERO)
                    part = (c[2 * half] - offset * sum_x[0]) * scales[2 * i + half]
                    new_totals += (totals[2 * i + half] + part,)
        sums = new_sums
        if GROUPED:
            totals = new_totals
    if not GROUPED:
        totals = ()
        for i in tl.static_range(EIGHTS):
            offset = _OFFSET + (steps[0][2][i] if HAS_ZERO else _ZERO)
            totals += (sums[i // 2][i % 2 * 2] - offset * sum_x[0],)

    joined = tl.join(totals[0], totals[1])
    if EIGHTS == 4:
        joined = tl.join(tl.join(totals[0], totals[2]), tl.join(totals[1], totals[3]))
    if _INTERPRETED:
        y = tl.sum(tl.reshape(joined, (8, 4, WARPS, EIGHTS)), 2)
    else:
        y = tl.sum(tl.reshape(joined, (WARPS, 8, 4, EIGHTS)), 0)
    y = tl.sum(tl.where((tl.arange(0, 4) == 0)[None, :, None], y, 0.0), 1)  # each t has the same
    rows = first_row + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, EIGHTS)[None, :]
    mask = rows < OUT
    if not GROUPED:
        y *= tl.load(scale_ptr + rows, mask=mask, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, rounded(y, dtype), mask=mask)
