"""Weights of 8 and 4 bits in registers, made floating-point numbers: e4m3, and the nibbles of bytes, which
are integers, MXFP4 or NVFP4."""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)

# Four bytes to four pairs of 128 + nibble: the low nibbles of bytes 0 and 1, of 2 and 3, and the high ones.
_UNPACK = tl.constexpr("""{
    .reg .b32 even, odd, one, offset;
    prmt.b32 even, $4, 0, 0x4140;
    prmt.b32 odd, $4, 0, 0x4342;
    lop3.b32 $0, even, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, odd, 0x000F000F, 0x43004300, 0xEA;
    shr.b32 even, even, 4;
    shr.b32 odd, odd, 4;
    lop3.b32 $2, even, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, odd, 0x000F000F, 0x43004300, 0xEA;
""")
_SUBTRACT = tl.constexpr("""
    mov.b32 one, 0x3F803F80;
    mov.b32 offset, 0xC308C308;
    fma.rn.bf16x2 $0, $0, one, offset;
    fma.rn.bf16x2 $1, $1, one, offset;
    fma.rn.bf16x2 $2, $2, one, offset;
    fma.rn.bf16x2 $3, $3, one, offset;
""")

# A code's sign becomes that of a bfloat16, its other bits the last of the exponent and the first of the
# mantissa: 2 ** -126 of its value. Of two codes at once: the low ones of bytes 0 and 1, of 2 and 3, and the
# high ones.
_MXFP4 = tl.constexpr("""{
    .reg .b32 even, odd, zero, factor;
    mov.b32 zero, 0x80008000;
    mov.b32 factor, 0x7E807E80;
    prmt.b32 even, $4, 0, 0x4140;
    prmt.b32 odd, $4, 0, 0x4342;
    and.b32 $0, even, 0x000F000F;
    and.b32 $1, odd, 0x000F000F;
    and.b32 $2, even, 0x00F000F0;
    and.b32 $3, odd, 0x00F000F0;
    mul.lo.u32 $0, $0, 0x1040;
    mul.lo.u32 $1, $1, 0x1040;
    mul.lo.u32 $2, $2, 0x104;
    mul.lo.u32 $3, $3, 0x104;
    and.b32 $0, $0, 0x81C081C0;
    and.b32 $1, $1, 0x81C081C0;
    and.b32 $2, $2, 0x81C081C0;
    and.b32 $3, $3, 0x81C081C0;
    fma.rn.bf16x2 $0, $0, factor, zero;
    fma.rn.bf16x2 $1, $1, factor, zero;
    fma.rn.bf16x2 $2, $2, factor, zero;
    fma.rn.bf16x2 $3, $3, factor, zero;
    fma.rn.bf16x2 $0, $0, $5, zero;
    fma.rn.bf16x2 $1, $1, $6, zero;
    fma.rn.bf16x2 $2, $2, $5, zero;
    fma.rn.bf16x2 $3, $3, $6, zero;
}""")

# As _MXFP4, with the factor in the scales, which come as pairs. Half of the masks, and the other half of the
# nibbles by a subtraction: bitwise instructions are the rarer ones.
_NVFP4 = tl.constexpr("""{
    .reg .b32 even, odd, zero;
    mov.b32 zero, 0x80008000;
    prmt.b32 even, $4, 0, 0x4140;
    prmt.b32 odd, $4, 0, 0x4342;
    and.b32 $0, even, 0x000F000F;
    and.b32 $1, odd, 0x000F000F;
    mad.lo.u32 $2, $0, 0xFFFFFFFF, even;
    mad.lo.u32 $3, $1, 0xFFFFFFFF, odd;
    mul.lo.u32 $0, $0, 0x1040;
    mul.lo.u32 $1, $1, 0x1040;
    mul.lo.u32 $2, $2, 0x104;
    mul.lo.u32 $3, $3, 0x104;
    and.b32 $0, $0, 0x81C081C0;
    and.b32 $1, $1, 0x81C081C0;
    and.b32 $2, $2, 0x81C081C0;
    and.b32 $3, $3, 0x81C081C0;
    fma.rn.bf16x2 $0, $0, $5, zero;
    fma.rn.bf16x2 $1, $1, $7, zero;
    fma.rn.bf16x2 $2, $2, $5, zero;
    fma.rn.bf16x2 $3, $3, $7, zero;
}""")


@triton.jit
def widened_e4m3(codes, NATIVE: tl.constexpr):
    """uint8 -> float16, exactly."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The exponent's bias is 15 instead of 7.
        bits = codes.to(tl.int16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def from_nibbles(tile, zero, HAS_ZERO: tl.constexpr, dtype: tl.constexpr):
    """uint8 -> (its low nibble - zero, its high nibble - zero) in `dtype`, exactly. As the last bits of 128
    (bfloat16) or 1024 (float16) nibbles are numbers without a conversion."""
    if dtype == tl.float32:
        return (tile & 15).to(tl.float32) - zero, (tile >> 4).to(tl.float32) - zero
    elif dtype == tl.float16:
        low = ((tile & 15).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        high = ((tile >> 4).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        offset = (1024.0 + zero).to(tl.float16)
        return low - offset, high - offset
    elif HAS_ZERO:
        low, high = tl.inline_asm_elementwise(
            _UNPACK + "}", "=r,=r,=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        offset = (128.0 + zero).to(tl.bfloat16)
        return low - offset, high - offset
    else:
        return tl.inline_asm_elementwise(
            _UNPACK + _SUBTRACT + "}", "=r,=r,=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def mxfp4_scales(exponents, dtype: tl.constexpr):
    """uint8 -> 2 ** (exponent - 127), in bfloat16 or float32. 2 ** -127 is subnormal."""
    if dtype == tl.bfloat16:
        bits = tl.where(exponents == 0, 0x40, exponents.to(tl.int16) << 7)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        bits = tl.where(exponents == 0, 0x00400000, exponents.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def from_mxfp4(tile, scales, dtype: tl.constexpr):
    """uint8 codes, the scale of each -> (what the low halves stand for, what the high ones stand for) in
    `dtype`, exactly: `mxfp4_scales`, or e4m3, whose four bits of mantissa times the two of a code fit a
    bfloat16 and a float16."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _MXFP4, "=&r,=&r,=&r,=&r,r,r,r", [tile, scales], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        return _mxfp4_values(tile & 15, scales).to(dtype), _mxfp4_values(tile >> 4, scales).to(dtype)


@triton.constexpr_function
def nvfp4_factor(dtype):
    """What the weights of `from_nvfp4` are still to be multiplied by: 2 ** 126 times the largest scale, 448,
    is no bfloat16."""
    return 1.0 if INTERPRETED or dtype != tl.bfloat16 else 128.0


@triton.jit
def from_nvfp4(tile, scales, HALF: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """uint8 codes [rows, step], e4m3 codes of the scales [rows, step / HALF] -> as `from_mxfp4`, divided by
    `nvfp4_factor`."""
    ROWS: tl.constexpr = tile.shape[0]
    STEP: tl.constexpr = tile.shape[1]
    scales = widened_e4m3(scales, NATIVE)
    if dtype == tl.bfloat16 and not _INTERPRETED:
        scales = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [scales.to(tl.float32) * 2.0**119], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        scales = scales.to(dtype)
    scales = tl.broadcast_to(scales[:, :, None], (ROWS, STEP // HALF, HALF)).reshape(ROWS, STEP)
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _NVFP4, "=&r,=&r,=&r,=&r,r,r,r,r,r", [tile, scales], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return from_mxfp4(tile, scales, dtype)


@triton.jit
def _mxfp4_values(codes, scales):
    """As `from_mxfp4`, in float32: the bits of a code are those of 2 ** -126 of its value."""
    codes = codes.to(tl.int32)
    return (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126 * scales
