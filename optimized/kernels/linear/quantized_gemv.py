"""One token times weights in 8 or 4 bits: the quantized linear layers of a decode step at batch 1.

Roofline bound: the weights' bytes, out_features * in_features, half of that for 4 bits, and 4 bytes for each
scale, over the memory bandwidth.

Shape: as in warp_gemv.py. A warp computes ROWS outputs, each whole. A lane loads 16 bytes of a row at a time,
the first of them before it waits for the previous kernel, and nothing goes through shared memory. Tensor
cores would be idle but for one column.

A GPU converts integers to floats four times slower than it multiplies. So the nibbles of a 4-bit weight
become floats where they lie: a nibble n at bit 4 * p of the mantissa of 2^(23 - 4 * p) is the float
2^(23 - 4 * p) + n. The bits of a code of NVFP4 are those of 2^-126 of its value, so the input is multiplied
by 2^64, and the scale of a group by 2^62.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.carveout import prefer_l1
from diptych.optimized.kernels.linear.quantize_input import QuantizedInput, has_fp8
from diptych.optimized.kernels.linear.quantized_values import widened_e4m3
from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded, widened
from diptych.shared.types.quant_scheme import INT4_ZERO, QuantScheme

_ZERO = tl.constexpr(INT4_ZERO)
_INTERPRETED = tl.constexpr(INTERPRETED)


class GemvTile(NamedTuple):
    rows: int  # outputs of a warp
    warps: int
    steps: int = 1  # of 16 bytes for each lane, from a row at a time; 4 bits: 1
    ahead: int = 1  # of these, loaded before the input


@triton.jit
def _load_once(tile, mask, IS_MASKED: tl.constexpr):
    """Weights are read once: they must not evict the input from the cache."""
    if IS_MASKED:
        return tl.load(tile, mask=mask, other=0, eviction_policy="evict_first")
    else:
        return tl.load(tile, eviction_policy="evict_first")


@triton.jit
def _of_words(x, WARPS: tl.constexpr, STEPS: tl.constexpr):
    """x [32, WARPS, STEPS, 8] -> two tuples of the four inputs of a word's bytes, each [32, WARPS, STEPS]."""
    even, odd = tl.split(tl.reshape(x, (32, WARPS, STEPS, 4, 2)))
    first, third = tl.split(tl.reshape(even, (32, WARPS, STEPS, 2, 2)))
    second, fourth = tl.split(tl.reshape(odd, (32, WARPS, STEPS, 2, 2)))
    a0, a1 = tl.split(first)
    b0, b1 = tl.split(second)
    c0, c1 = tl.split(third)
    d0, d1 = tl.split(fourth)
    return (a0, b0, c0, d0), (a1, b1, c1, d1)


@triton.jit
def _and_or(x, AND: tl.constexpr, OR: tl.constexpr):
    """(x & AND) | OR in one instruction; the compiler makes two."""
    if _INTERPRETED:
        return (x & AND) | OR
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [x, AND, OR], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _nibble_sum(total, words, x, zero):
    """total and the sum over the eight nibbles n of a word, an int32, of (n - zero) * x: the inputs of the
    nibbles in their order."""
    for j in tl.static_range(8):
        moved = words if j < 5 else words >> 20  # a sixth nibble would reach the bits of the exponent
        bits = _and_or(moved, 15 * 16 ** (j % 5), (150 - 4 * (j % 5)) * 8388608)
        total += (bits.to(tl.float32, bitcast=True) - (8388608.0 / 16.0 ** (j % 5) + zero)) * x[j]
    return total


@triton.jit
def _code_sum(total, words, x):
    """As `_nibble_sum`, for the eight codes of NVFP4 in a word, times 2^-126."""
    for byte in tl.static_range(2):  # and the one two bytes later, whose codes are moved along
        moved = words if byte == 0 else words >> 8
        for half in tl.static_range(2):
            bits = (moved & (0x000F000F << 4 * half)) * (0x1040 >> 4 * half)
            first = ((bits << 16) & (0x81C00000 - 2**32)).to(tl.float32, bitcast=True)
            third = (bits & (0x81C00000 - 2**32)).to(tl.float32, bitcast=True)
            total += first * x[2 * byte + half]
            total += third * x[2 * byte + half + 4]
    return total


@triton.jit
def _packed_gemv_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, stride_words, num_groups,
    OUT: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr, HAS_ZERO: tl.constexpr,
    IS_NVFP4: tl.constexpr, NATIVE: tl.constexpr,
    WARPS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = UNIT // 2
    COLUMNS: tl.constexpr = 32 * 4  # words of a tile
    TILES: tl.constexpr = (SIZE // 8 + COLUMNS - 1) // COLUMNS
    MASKED: tl.constexpr = SIZE // 8 % COLUMNS != 0
    IS_MASKED: tl.constexpr = MASKED or OUT % (WARPS * ROWS) != 0
    lanes, warps = tl.arange(0, 32), tl.arange(0, WARPS)
    columns = lanes[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    columns += warps[None, :, None, None] * 0
    first_rows = tl.program_id(0) * (WARPS * ROWS) + warps * ROWS
    tile_rows = first_rows[None, :, None, None]
    tile = weight_ptr + tile_rows.to(tl.int64) * stride_words + columns
    weights = ()
    for i in tl.static_range(AHEAD):
        for r in tl.static_range(ROWS):
            mask = (columns + i * COLUMNS < SIZE // 8) & (tile_rows + r < OUT)
            weights += (_load_once(tile + r * stride_words + i * COLUMNS, mask, IS_MASKED or i >= TILES),)
    rows = first_rows[None, :] + lanes[:, None]
    mask_rows = (lanes < ROWS)[:, None] & (rows < OUT)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros([32, WARPS, 1], tl.float32),)
    elements = tl.arange(0, 8)[None, None, None, :]
    for i in tl.range(TILES):  # unrolled, a row of 12,288 inputs takes half a minute to compile
        next_weights = ()
        for j in tl.static_range(ROWS, AHEAD * ROWS):
            next_weights += (weights[j],)
        for r in tl.static_range(ROWS):
            mask = (columns + (i + AHEAD) * COLUMNS < SIZE // 8) & (tile_rows + r < OUT)
            next_weights += (_load_once(tile + r * stride_words + (i + AHEAD) * COLUMNS, mask, True),)
        # A lane's 16 bytes lie in one unit, of NVFP4 in two; a byte's high nibble belongs to the input half a
        # unit later.
        first_byte = (i * COLUMNS + lanes * 4) * 4
        unit = first_byte // HALF
        x_ptrs = x_ptr + (unit * UNIT + first_byte % HALF)[:, None, None, None] + elements
        x_ptrs += warps[None, :, None, None] * 0
        is_column = (first_byte < SIZE // 2)[:, None, None, None] & (
            elements + warps[None, :, None, None] >= 0
        )
        x = ()
        for place in tl.static_range(4):  # low and high nibbles of eight bytes, and of the next eight
            loaded = tl.load(
                x_ptrs + place // 2 * (16 if IS_NVFP4 else 8) + place % 2 * HALF,
                is_column if MASKED else None, other=0.0 if MASKED else None,
            )  # fmt: skip
            values = widened(loaded, USE_PDL)
            x += (_of_words(values * 2.0**64 if IS_NVFP4 else values, WARPS, 1),)
        of_words = ()
        for word in tl.static_range(4):
            low, high = x[word // 2 * 2][word % 2], x[word // 2 * 2 + 1][word % 2]
            inputs = ()
            for j in tl.static_range(8):
                inputs += (low[j // 2] if j % 2 == 0 else high[j // 2],)
            of_words += (inputs,)
        new_sums = ()
        for r in tl.static_range(ROWS):
            even, odd = tl.split(tl.reshape(weights[r], (32, WARPS, 1, 2, 2)))
            w0, w2 = tl.split(even)
            w1, w3 = tl.split(odd)
            group_mask = (unit < SIZE // UNIT)[:, None, None] & (first_rows[None, :, None] + r < OUT)
            groups = (first_rows[None, :, None] + r).to(tl.int64) * num_groups + unit[:, None, None] * GROUPED
            if IS_NVFP4:
                none = tl.zeros([32, WARPS, 1], tl.float32)
                part = _code_sum(_code_sum(none, w0, of_words[0]), w1, of_words[1])
                scale = tl.load(scale_ptr + groups, mask=group_mask, other=0)
                total = sums[r] + part * (widened_e4m3(scale, NATIVE).to(tl.float32) * 2.0**62)
                part = _code_sum(_code_sum(none, w2, of_words[2]), w3, of_words[3])
                scale = tl.load(scale_ptr + groups + 1, mask=group_mask, other=0)
                new_sums += (total + part * (widened_e4m3(scale, NATIVE).to(tl.float32) * 2.0**62),)
            else:
                zero = _ZERO
                if HAS_ZERO:
                    zero = tl.load(zero_ptr + groups, mask=group_mask, other=0).to(tl.float32)
                part = tl.zeros([32, WARPS, 1], tl.float32) if GROUPED else sums[r]
                part = _nibble_sum(_nibble_sum(part, w0, of_words[0], zero), w1, of_words[1], zero)
                part = _nibble_sum(_nibble_sum(part, w2, of_words[2], zero), w3, of_words[3], zero)
                if GROUPED:
                    part = sums[r] + part * tl.load(scale_ptr + groups, mask=group_mask, other=0.0)
                new_sums += (part,)
        sums, weights = new_sums, next_weights

    y = tl.zeros([32, WARPS], tl.float32)
    for r in tl.static_range(ROWS):
        y = tl.where(lanes[:, None] == r, tl.sum(tl.sum(sums[r], 2), 0)[None, :], y)
    if IS_NVFP4:
        y *= tl.load(zero_ptr + rows * 2, mask=mask_rows, other=0.0)
        y = y / tl.load(zero_ptr + rows * 2 + 1, mask=mask_rows, other=1.0)
    elif not GROUPED:
        y *= tl.load(scale_ptr + rows, mask=mask_rows, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=mask_rows, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=mask_rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, rounded(y, y_ptr.dtype.element_ty), mask=mask_rows)


@triton.jit
def _fp8_gemv_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr, stride_weight, num_groups,
    OUT: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, NATIVE: tl.constexpr,
    WARPS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = STEPS * 32 * 16
    TILES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    MASKED: tl.constexpr = SIZE % COLUMNS != 0
    IS_MASKED: tl.constexpr = MASKED or OUT % (WARPS * ROWS) != 0
    lanes, warps = tl.arange(0, 32), tl.arange(0, WARPS)
    starts = (tl.arange(0, STEPS)[None, None, :] * 32 + lanes[:, None, None]) * 16 + warps[None, :, None] * 0
    columns = starts[:, :, :, None] + tl.arange(0, 16)[None, None, None, :]
    first_rows = tl.program_id(0) * (WARPS * ROWS) + warps * ROWS
    tile_rows = first_rows[None, :, None, None]
    tile = weight_ptr + tile_rows.to(tl.int64) * stride_weight + columns
    weights = ()
    for i in tl.static_range(AHEAD):
        for r in tl.static_range(ROWS):
            mask = (columns + i * COLUMNS < SIZE) & (tile_rows + r < OUT)
            weights += (_load_once(tile + (r * stride_weight + i * COLUMNS), mask, IS_MASKED),)
    rows = first_rows[None, :] + lanes[:, None]
    mask_rows = (lanes < ROWS)[:, None] & (rows < OUT)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros([32, WARPS, STEPS], tl.float32),)
    for i in tl.static_range(TILES):
        if i + AHEAD < TILES:
            for r in tl.static_range(ROWS):
                mask = (columns + (i + AHEAD) * COLUMNS < SIZE) & (tile_rows + r < OUT)
                next_tile = tile + (r * stride_weight + (i + AHEAD) * COLUMNS)
                weights += (_load_once(next_tile, mask, IS_MASKED),)
        column = starts + i * COLUMNS
        if MASKED:
            codes = tl.load(x_ptr + i * COLUMNS + columns, mask=columns + i * COLUMNS < SIZE, other=0)
        else:
            codes = tl.load(x_ptr + i * COLUMNS + columns)
        x = widened_e4m3(codes, NATIVE).to(tl.float32)
        if X_GROUP > 0:
            x_scale = tl.load(x_scale_ptr + column // X_GROUP, mask=column < SIZE, other=0.0)
        new_sums = ()
        for r in tl.static_range(ROWS):
            part = tl.sum(x * widened_e4m3(weights[i * ROWS + r], NATIVE).to(tl.float32), 3)
            if X_GROUP > 0:
                part *= x_scale
            if GROUP > 0:
                mask = (column < SIZE) & (first_rows[None, :, None] + r < OUT)
                row = (first_rows[None, :, None] + r).to(tl.int64) * num_groups
                part *= tl.load(scale_ptr + row + column // GROUP, mask=mask, other=0.0)
            new_sums += (sums[r] + part,)
        sums = new_sums

    y = tl.zeros([32, WARPS], tl.float32)
    for r in tl.static_range(ROWS):
        y = tl.where(lanes[:, None] == r, tl.sum(tl.sum(sums[r], 2), 0)[None, :], y)
    if GROUP == 0:
        y *= tl.load(scale_ptr + rows, mask=mask_rows, other=0.0)
    if X_GROUP == 0:
        y *= tl.load(x_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=mask_rows, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=mask_rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, rounded(y, y_ptr.dtype.element_ty), mask=mask_rows)


def suits_gemv(x: torch.Tensor | QuantizedInput, scheme: QuantScheme, size: int) -> bool:
    """Whether quantized_gemv computes this: a token times e4m3 by e4m3, or INT4 or NVFP4 by 16 bits."""
    if isinstance(x, QuantizedInput):
        return len(x.q) == 1 and scheme.weight_type == "fp8" and (scheme.group_size or 16) % 16 == 0
    if scheme.weight_type == "nvfp4":
        return len(x) == 1 and size % 32 == 0
    return len(x) == 1 and scheme.weight_type == "int4" and scheme.unit(size) % 32 == 0


def quantized_gemv(
    x: torch.Tensor | QuantizedInput,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: QuantScheme,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: GemvTile | None = None,
) -> None:
    """`quantized_gemm` for one token, y [1, out]. `suits_gemv` must hold."""
    values = x.q if isinstance(x, QuantizedInput) else x
    size, out, num_groups = values.shape[1], len(weight), scale.shape[1]
    assert y.shape == (1, out)
    assert values.stride(1) == weight.stride(1) == scale.stride(1) == y.stride(1) == 1
    rows, warps, steps, ahead = tile or plan(scheme)
    is_nvfp4 = scheme.weight_type == "nvfp4"
    scale = scale.view(torch.uint8) if is_nvfp4 else scale  # GPUs before sm_89 have no type for e4m3
    grid = (triton.cdiv(out, warps * rows),)
    options = {
        "OUT": out, "SIZE": size, "WARPS": warps, "ROWS": rows, "AHEAD": ahead,
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None,
        "num_warps": 4 if INTERPRETED else warps, **pdl_options(values),
    }  # fmt: skip
    bias = scale if bias is None else bias
    residual = scale if residual is None else residual
    if isinstance(x, QuantizedInput):
        x_grouped = scheme.inputs == "group" and x.scale.shape[-1] > 1
        launched = _fp8_gemv_kernel[grid](
            values.view(torch.uint8), x.scale, weight.view(torch.uint8), scale, bias, residual, y,
            weight.stride(0), num_groups, STEPS=steps,
            GROUP=(scheme.group_size or 0) if num_groups > 1 else 0,
            X_GROUP=(scheme.group_size or 0) if x_grouped else 0, NATIVE=has_fp8(values.device), **options,
        )  # fmt: skip
    else:
        launched = _packed_gemv_kernel[grid](
            values, weight.view(torch.int32), scale, scale if zero is None else zero, bias, residual, y,
            weight.stride(0) // 4, num_groups, UNIT=scheme.unit(size), GROUPED=num_groups > 1,
            HAS_ZERO=zero is not None, IS_NVFP4=is_nvfp4, NATIVE=has_fp8(values.device), **options,
        )  # fmt: skip
    prefer_l1(launched)


def plan(scheme: QuantScheme) -> GemvTile:
    """The best on average for the layers of Qwen3-8B on an H200. The GPU's table has better ones for shapes
    that `diptych tune --quantization` has measured."""
    if INTERPRETED:
        return GemvTile(1, 64, 1 if scheme.is_packed else 2)
    return GemvTile(2, 4) if scheme.is_packed else GemvTile(2, 8, 2)
