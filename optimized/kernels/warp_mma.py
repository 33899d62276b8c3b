"""Tensor cores that multiply what a warp holds in registers, without shared memory.

`mma.sync` spreads its matrices over the lanes of a warp. With g = lane // 4 and t = lane % 4, a 32-bit word
of A holds two values (four of int8) of row g or g + 8, a word of B as many of column g, and C the columns
2 t and 2 t + 1 of the rows g and g + 8. Which inputs of a sum a lane has does not matter as long as A and B
agree: so a lane may take 16 successive bytes of a row as they come from memory.

Here each thread has one word of a tensor [32, WARPS]: dimension 0 is the lane, dimension 1 the warp. Triton
chooses this layout if every load is [32, WARPS, n] with 16 successive bytes along the last dimension;
tests/kernels/test_portability.py checks it in the compiled kernels. The interpreter computes the same from
the same words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from optimized.kernels.portable import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)

_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def mma(a, b, c, KIND: tl.constexpr, WARPS: tl.constexpr):
    """A @ B + C. a: four words, of row g, g + 8, g, g + 8; b: two words of column g, the first for the first
    two of a. c: (row g, column 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1). KIND: "f16" and "bf16", C
    in float32, or "s8", C in int32."""
    if _INTERPRETED:
        upper = _products(a[0], b[0], KIND, WARPS) + _products(a[2], b[1], KIND, WARPS)
        lower = _products(a[1], b[0], KIND, WARPS) + _products(a[3], b[1], KIND, WARPS)
        u0, u1 = tl.split(tl.permute(tl.reshape(upper, (32, 2, WARPS)), (0, 2, 1)))
        l0, l1 = tl.split(tl.permute(tl.reshape(lower, (32, 2, WARPS)), (0, 2, 1)))
        dtype: tl.constexpr = c[0].dtype
        return c[0] + u0.to(dtype), c[1] + u1.to(dtype), c[2] + l0.to(dtype), c[3] + l1.to(dtype)
    elif KIND == "s8":
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif KIND == "f16":
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _products(a, b, KIND: tl.constexpr, WARPS: tl.constexpr):
    """The interpreter's sums over the values of the four lanes of a row and a column: [8, 8, WARPS]."""
    total = tl.zeros([8, 8, WARPS], tl.float32)
    for i in tl.static_range(4 if KIND == "s8" else 2):
        row = tl.reshape(value(a, i, KIND), (8, 1, 4, WARPS))
        column = tl.reshape(value(b, i, KIND), (1, 8, 4, WARPS))
        total += tl.sum(row * column, 2)
    return total


@triton.jit
def value(words, i: tl.constexpr, KIND: tl.constexpr):
    """Value i of each word, in float32."""
    if KIND == "s8":
        return ((words << (24 - 8 * i)) >> 24).to(tl.float32)
    elif KIND == "f16":
        return (words >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return ((words << (16 - 16 * i)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def from_lane(words, lane, WARPS: tl.constexpr):
    """Each thread's word of another lane of its warp, which has the same t."""
    if _INTERPRETED:
        groups = tl.reshape(words, (8, 4, WARPS))
        is_source = tl.reshape(lane // 4, (8, 4, WARPS)) == tl.arange(0, 8)[:, None, None]
        found = tl.sum(tl.where(is_source, groups, 0), 0)
        return tl.reshape(tl.broadcast_to(found[None, :, :], (8, 4, WARPS)), (32, WARPS))
    else:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [words, lane],
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
    """Words of two values of a 16-bit type."""
    low_bits = low.to(tl.uint16, bitcast=True).to(tl.int32)
    return low_bits | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pairs(x, WARPS: tl.constexpr):
    """x [32, WARPS, 8] of a 16-bit type -> four words of two successive values."""
    even, odd = tl.split(tl.reshape(x, (32, WARPS, 4, 2)))
    return four(halves_of(even, odd), WARPS)


@triton.jit
def e4m3_byte(words, i: tl.constexpr):
    """Byte i of words of e4m3, in float16: the exponent's bias is 15 instead of 7."""
    bits = (words >> (8 * i)).to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def widened_e4m3_words(words, NATIVE: tl.constexpr):
    """Words of four e4m3 -> two words of float16, of the values 0 and 1, 2 and 3. NATIVE: the GPU converts
    e4m3."""
    if NATIVE and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        return (
            halves_of(e4m3_byte(words, 0), e4m3_byte(words, 1)),
            halves_of(e4m3_byte(words, 2), e4m3_byte(words, 3)),
        )
