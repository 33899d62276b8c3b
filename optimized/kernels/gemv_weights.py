"""The weights of `quantized_gemv` in registers: from memory, unpacked, and multiplied.

A run is 64 bytes of a row, 16 in each of four lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from optimized.kernels.portable import INTERPRETED
from optimized.kernels.warp_mma import four, from_lane, halves_of, mma, widened_e4m3_words

_INTERPRETED = tl.constexpr(INTERPRETED)

# Nibbles become floats where they lie: as the last bits of 128 (bfloat16) or 1024 (float16), two in a word.
# $5 is minus that number and the zero point, in both halves.
_NIBBLES_BF16 = tl.constexpr("""{
    .reg .b32 at4, at8, at12, one;
    shr.b32 at4, $4, 4;
    shr.b32 at8, $4, 8;
    shr.b32 at12, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, at8, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, at4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, at12, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 one, 0x3F803F80;
    fma.rn.bf16x2 $0, $0, one, $5;
    fma.rn.bf16x2 $1, $1, one, $5;
    fma.rn.bf16x2 $2, $2, one, $5;
    fma.rn.bf16x2 $3, $3, one, $5;
}""")
_NIBBLES_F16 = tl.constexpr("""{
    .reg .b32 at4, at8, at12;
    shr.b32 at4, $4, 4;
    shr.b32 at8, $4, 8;
    shr.b32 at12, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $1, at8, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $2, at4, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $3, at12, 0x000F000F, 0x64006400, 0xEA;
    add.f16x2 $0, $0, $5;
    add.f16x2 $1, $1, $5;
    add.f16x2 $2, $2, $5;
    add.f16x2 $3, $3, $5;
}""")


@triton.jit
def minus_offset(zero, dtype: tl.constexpr):
    """What `_nibble_words` adds; the interpreter's needs no offset."""
    if _INTERPRETED:
        return -zero
    elif dtype == tl.bfloat16:
        return zero * 0x10001 - 0x3CFF3D00  # 0xC300C300
    else:
        return zero * 0x10001 - 0x1BFF1C00  # 0xE400E400


@triton.jit
def _nibble_words(words, minus_offset, dtype: tl.constexpr):
    """Words of eight nibbles -> four words of two values minus the zero point: the low nibbles of bytes 0 and
    2, those of 1 and 3, and the high ones."""
    if _INTERPRETED:
        found = ()
        for i in tl.static_range(4):
            low = (words >> (8 * (i % 2) + 4 * (i // 2))) & 15
            high = (words >> (8 * (i % 2) + 4 * (i // 2) + 16)) & 15
            pair = ((low + minus_offset).to(tl.float32), (high + minus_offset).to(tl.float32))
            found += (halves_of(pair[0].to(dtype), pair[1].to(dtype)),)
        return found
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _NIBBLES_BF16, "=&r,=&r,=&r,=&r,r,r", [words, minus_offset],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _NIBBLES_F16, "=&r,=&r,=&r,=&r,r,r", [words, minus_offset],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def load_step(
    weight_ptr, scale_ptr, zero_ptr, block, first_run, stride_words, num_groups,
    OUT: tl.constexpr, RUNS: tl.constexpr, SCALE_BYTES: tl.constexpr, HAS_ZERO: tl.constexpr,
    WARPS: tl.constexpr, WARP_RUNS: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """STEP runs, from a warp's first_run on, of the rows g and g + 8 of a block (gate and up), with their
    scales and zero points."""
    lanes, warps = tl.arange(0, 32), tl.arange(0, WARPS)
    words, scales, zeros = (), (), ()
    for i in tl.static_range(STEP):
        run = warps * WARP_RUNS + first_run + i
        columns = (lanes % 4)[:, None] * 4 + run[None, :] * 16
        group = run * 64 // SCALE_BYTES if SCALE_BYTES > 0 else run * 0
        for half in tl.static_range(2):
            row = block * 8 + lanes // 4 + half * OUT if GATED else block * 16 + lanes // 4 + half * 8
            is_row = row < OUT * (half + 1) if GATED else row < OUT
            mask = is_row[:, None] & (run < RUNS)[None, :]
            start = row.to(tl.int64)[:, None]
            tile = weight_ptr + (start * stride_words + columns)[:, :, None] + tl.arange(0, 4)[None, None, :]
            groups = start * num_groups + group[None, :]
            if MASKED:
                tile_mask = mask[:, :, None] & (tl.arange(0, 4) >= 0)[None, None, :]
                words += (tl.load(tile, mask=tile_mask, other=0, eviction_policy="evict_first"),)
            else:
                words += (tl.load(tile, eviction_policy="evict_first"),)
            if SCALE_BYTES > 0:
                scales += (
                    tl.load(scale_ptr + groups, mask=mask if MASKED else None, other=0.0 if MASKED else None),
                )
            if HAS_ZERO:
                zeros += (tl.load(zero_ptr + groups, mask=mask, other=0).to(tl.int32),)
    return words, scales, zeros


@triton.jit
def add_run(
    c,
    upper,
    lower,
    x,
    source,
    zeros,
    WEIGHT: tl.constexpr,
    dtype: tl.constexpr,
    NATIVE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """c + the products of a run: 16 bytes of each row in a lane, and x of lane `source`."""
    KIND: tl.constexpr = (
        "s8" if WEIGHT == "int8" else ("bf16" if WEIGHT == "int4" and dtype == tl.bfloat16 else "f16")
    )
    u, v = four(upper, WARPS), four(lower, WARPS)
    if WEIGHT == "int8":
        for j in tl.static_range(2):
            b = from_lane(x[2 * j], source, WARPS), from_lane(x[2 * j + 1], source, WARPS)
            c = mma((u[2 * j], v[2 * j], u[2 * j + 1], v[2 * j + 1]), b, c, KIND, WARPS)
    elif WEIGHT == "fp8":
        for j in tl.static_range(4):
            b = from_lane(x[2 * j], source, WARPS), from_lane(x[2 * j + 1], source, WARPS)
            u0, u1 = widened_e4m3_words(u[j], NATIVE)
            v0, v1 = widened_e4m3_words(v[j], NATIVE)
            c = mma((u0, v0, u1, v1), b, c, KIND, WARPS)
    else:
        for j in tl.static_range(4):
            u0, u1, u2, u3 = _nibble_words(u[j], zeros[0], dtype)
            v0, v1, v2, v3 = _nibble_words(v[j], zeros[1], dtype)
            b = from_lane(x[2 * j], source, WARPS), from_lane(x[2 * j + 1], source, WARPS)
            c = mma((u0, v0, u1, v1), b, c, KIND, WARPS)
            b = from_lane(x[2 * j + 8], source, WARPS), from_lane(x[2 * j + 9], source, WARPS)
            c = mma((u2, v2, u3, v3), b, c, KIND, WARPS)
    return c
