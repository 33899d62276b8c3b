"""Weights of 8 and 4 bits in registers, made floating-point numbers: e4m3, and the nibbles of bytes."""

from __future__ import annotations

import triton
import triton.language as tl

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
