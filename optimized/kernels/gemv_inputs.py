"""The inputs of `quantized_gemv`: the norm and the quantization before a layer, inside its GEMV.

Each CTA does it again for the whole token, which takes less time than another kernel between two GEMVs. A
lane has the inputs of one run in eight (a run: 64 bytes of a row of weights) and prepares those alone; when
the weights of a run are multiplied, shuffles give all lanes its inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from optimized.kernels.portable import largest_or_nan, rounded
from optimized.kernels.quantize_input import e4m3_code, nearest_integer
from optimized.kernels.quantized_gemm import widened_e4m3
from optimized.kernels.warp_mma import four, halves_of, pairs, widened_e4m3_words


@triton.jit
def _run_of_lane(round: tl.constexpr, lanes, warps, RUNS: tl.constexpr, WARP_RUNS: tl.constexpr):
    """[32, WARPS]: the run that a lane prepares, and whether there is one."""
    of_warp = (round * 8 + lanes // 4)[:, None]
    run = warps[None, :] * WARP_RUNS + of_warp
    return run, (of_warp < WARP_RUNS) & (run < RUNS)


@triton.jit
def columns_of(
    lanes, warps, UNIT: tl.constexpr, IS_INT4: tl.constexpr, RUNS: tl.constexpr, WARP_RUNS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Which inputs a lane prepares, eight at a time: tuples of columns and masks, [32, WARPS, 8]. INT4: the
    low nibbles of 16 bytes, then the high ones, which are half a unit later."""
    HALF: tl.constexpr = UNIT // 2
    all_columns, masks = (), ()
    for r in tl.static_range(ROUNDS):
        run, is_run = _run_of_lane(r, lanes, warps, RUNS, WARP_RUNS)
        first = run * 64 + (lanes % 4 * 16)[:, None]
        if IS_INT4:
            first = first // HALF * UNIT + first % HALF
        columns = first[:, :, None] + tl.arange(0, 8)[None, None, :]
        mask = is_run[:, :, None] & (tl.arange(0, 8) >= 0)[None, None, :]
        for part in tl.static_range(4 if IS_INT4 else 2):
            all_columns += (columns + part % 2 * 8 + part // 2 * HALF,)
            masks += (mask,)
    return all_columns, masks


@triton.jit
def normed(xs, norm_weights, eps, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """RMSNorm of the tuple xs, rounded twice, as in rms_norm."""
    dtype: tl.constexpr = xs[0].dtype
    squares = tl.zeros([32, WARPS], tl.float32)
    for i in tl.static_range(len(xs)):
        wide = xs[i].to(tl.float32)
        squares += tl.sum(wide * wide, 2)
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 0), 0) / SIZE + eps)
    found = ()
    for i in tl.static_range(len(xs)):
        x = rounded(xs[i].to(tl.float32) * scale, dtype).to(tl.float32)
        found += (rounded(x * norm_weights[i].to(tl.float32), dtype),)
    return found


@triton.jit
def amax_of(xs, WARPS: tl.constexpr):
    """The largest absolute value, NaN if there is one."""
    largest = tl.zeros([32, WARPS], tl.float32)
    for i in tl.static_range(len(xs)):
        of_lane = largest_or_nan(tl.abs(xs[i].to(tl.float32)), 2)
        largest = tl.maximum(largest, of_lane, propagate_nan=tl.PropagateNan.ALL)
    return largest_or_nan(largest_or_nan(largest, 0), 0)


@triton.jit
def quantized_words(xs, scale, IS_FP8: tl.constexpr, NATIVE: tl.constexpr, WARPS: tl.constexpr):
    """For each run, the words of B: e4m3 values as eight words of float16, or four words of int8."""
    divisor = tl.where(scale == 0.0, 1.0, scale)
    found = ()
    for r in tl.static_range(len(xs) // 2):
        words = ()
        for part in tl.static_range(2):
            x = xs[2 * r + part].to(tl.float32)
            quotient = tl.div_rn(x, tl.zeros_like(x) + divisor)
            if IS_FP8:
                code = e4m3_code(tl.clamp(quotient, -448.0, 448.0), NATIVE)
                words += pairs(widened_e4m3(code, NATIVE), WARPS)
            else:
                q = tl.clamp(nearest_integer(quotient), -128.0, 127.0).to(tl.int32) & 255
                even, odd = tl.split(tl.reshape(q, (32, WARPS, 4, 2)))
                even, odd = tl.split(tl.reshape(even | (odd << 8), (32, WARPS, 2, 2)))
                words += tl.split(even | (odd << 16))
        found += (words,)
    return found


@triton.jit
def loaded_words(
    x_ptr, lanes, warps, IS_FP8: tl.constexpr, NATIVE: tl.constexpr, RUNS: tl.constexpr,
    WARP_RUNS: tl.constexpr, ROUNDS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """`quantized_words` of a token that is quantized already, at x_ptr as words."""
    found = ()
    for r in tl.static_range(ROUNDS):
        run, is_run = _run_of_lane(r, lanes, warps, RUNS, WARP_RUNS)
        first = run * 16 + (lanes % 4 * 4)[:, None]
        mask = is_run[:, :, None] & (tl.arange(0, 4) >= 0)[None, None, :]
        codes = tl.load(x_ptr + first[:, :, None] + tl.arange(0, 4)[None, None, :], mask=mask, other=0)
        w0, w1, w2, w3 = four(codes, WARPS)
        if IS_FP8:
            words = widened_e4m3_words(w0, NATIVE) + widened_e4m3_words(w1, NATIVE)
            words += widened_e4m3_words(w2, NATIVE) + widened_e4m3_words(w3, NATIVE)
            found += (words,)
        else:
            found += ((w0, w1, w2, w3),)
    return found


@triton.jit
def words_by_nibble(xs, WARPS: tl.constexpr):
    """For each run, the words of B that fit those of nibbles: inputs 0 and 2, 1 and 3, 4 and 6, 5 and 7 of
    every eight; eight words for low nibbles and eight for high ones."""
    found = ()
    for r in tl.static_range(len(xs) // 4):
        words = ()
        for part in tl.static_range(4):
            even, odd = tl.split(tl.reshape(xs[4 * r + part], (32, WARPS, 4, 2)))
            even0, even2 = tl.split(tl.reshape(even, (32, WARPS, 2, 2)))
            odd0, odd2 = tl.split(tl.reshape(odd, (32, WARPS, 2, 2)))
            first, third = tl.split(halves_of(even0, even2))
            second, fourth = tl.split(halves_of(odd0, odd2))
            words += (first, second, third, fourth)
        found += (words,)
    return found
