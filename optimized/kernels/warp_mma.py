"""Tensor cores that multiply what a warp holds in registers, without shared memory.

`mma.sync` spreads its matrices over the lanes of a warp. With g = lane // 4 and t = lane % 4, a 32-bit word
of A holds two float16 of row g or g + 8, a word of B two of column g, and C the columns 2 t and 2 t + 1 of
the rows g and g + 8. Which inputs of a sum a lane has does not matter as long as A and B agree: so a lane may
take 16 successive bytes of a row as they come from memory.

Here each thread has one word of a tensor [32, WARPS]: dimension 0 is the lane, dimension 1 the warp. On a GPU
a CTA is one warp: with several, Triton 3.9 divides the dimensions among threads in another way than 3.6.
tests/kernels/test_portability.py checks the layouts of compiled kernels. The interpreter computes the same
from the same words, for several warps at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)

_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def mma(a, b, c, WARPS: tl.constexpr):
    """A @ B + C in float32. a: four words, of row g, g + 8, g, g + 8; b: two words of column g, the first for
    the first two of a. c: (row g, column 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)."""
    if _INTERPRETED:
        upper = _products(a[0], b[0], WARPS) + _products(a[2], b[1], WARPS)
        lower = _products(a[1], b[0], WARPS) + _products(a[3], b[1], WARPS)
        u0, u1 = tl.split(tl.permute(tl.reshape(upper, (32, 2, WARPS)), (0, 2, 1)))
        l0, l1 = tl.split(tl.permute(tl.reshape(lower, (32, 2, WARPS)), (0, 2, 1)))
        return c[0] + u0, c[1] + u1, c[2] + l0, c[3] + l1
    else:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _products(a, b, WARPS: tl.constexpr):
    """The interpreter's sums over the values of the four lanes of a row and a column: [8, 8, WARPS]."""
    total = tl.zeros([8, 8, WARPS], tl.float32)
    for i in tl.static_range(2):
        row = (a >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        column = (b >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        total += tl.sum(tl.reshape(row, (8, 1, 4, WARPS)) * tl.reshape(column, (1, 8, 4, WARPS)), 2)
    return total


@triton.jit
def from_lane(words, lane, WARPS: tl.constexpr):
    """Each thread's word of a lane of its warp."""
    if _INTERPRETED:
        is_source = lane[:, None, :] == tl.arange(0, 32)[None, :, None]
        return tl.sum(tl.where(is_source, words[None, :, :], 0), 1)
    else:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [words, lane],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def transposed(words, WARPS: tl.constexpr):
    """The 8 x 8 matrix of 16-bit values of a warp, of which a lane has the columns 2 t and 2 t + 1 of row g,
    transposed."""
    if _INTERPRETED:
        low = tl.reshape(words & 0xFFFF, (8, 4, WARPS))
        high = tl.reshape((words >> 16) & 0xFFFF, (8, 4, WARPS))
        matrix = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (8, 8, WARPS))
        matrix = tl.reshape(tl.permute(matrix, (1, 0, 2)), (32, 2, WARPS))
        low, high = tl.split(tl.permute(matrix, (0, 2, 1)))
        return low | (high << 16)
    else:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [words],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def four(x, WARPS: tl.constexpr):
    """x [32, WARPS, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(x, (32, WARPS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def halves_of(low, high):
    """Words of two float16."""
    low_bits = low.to(tl.uint16, bitcast=True).to(tl.int32)
    return low_bits | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pairs(x, WARPS: tl.constexpr):
    """x [32, WARPS, 8] float16 -> four words of two successive values."""
    even, odd = tl.split(tl.reshape(x, (32, WARPS, 4, 2)))
    return four(halves_of(even, odd), WARPS)


@triton.jit
def float16_words(low, high):
    """Words of two float32, rounded to float16."""
    if _INTERPRETED:
        return halves_of(low.to(tl.float16), high.to(tl.float16))
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def e4m3_byte(words, i: tl.constexpr):
    """Byte i of words of e4m3, in float16; for the interpreter. The exponent's bias is 15 instead of 7, and
    0x7F is NaN."""
    bits = (words >> (8 * i)).to(tl.int16)
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def widened_e4m3_words(words):
    """Words of four e4m3 -> two words of float16, of the values 0 and 1, 2 and 3."""
    if _INTERPRETED:
        return (
            halves_of(e4m3_byte(words, 0), e4m3_byte(words, 1)),
            halves_of(e4m3_byte(words, 2), e4m3_byte(words, 3)),
        )
    else:
        return tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
