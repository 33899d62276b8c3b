"""FP8 in kernels: every value widened, and floats rounded as torch rounds them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import from_pool, kernel_view, to_pool
from diptych.optimized.kernels.attention.qk_norm_rope_store import qk_norm_rope_store
from diptych.shared.modeling.kv_pool import to_fp8
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.contracts.memory_pool.fp8_pool import FINITE, SCALES
from diptych.shared.types.attention import FP8, FP8_TYPES, KVScales


@triton.jit
def _widen_kernel(x_ptr, y_ptr, NUM: tl.constexpr):
    offs = tl.arange(0, NUM)
    tl.store(y_ptr + offs, from_pool(tl.load(x_ptr + offs), y_ptr.dtype.element_ty))


@triton.jit
def _round_kernel(x_ptr, y_ptr, scale, size, NUM: tl.constexpr):
    offs = tl.program_id(0) * NUM + tl.arange(0, NUM)
    x = tl.load(x_ptr + offs, mask=offs < size, other=0.0)
    tl.store(y_ptr + offs, to_pool(x, scale, y_ptr.dtype.element_ty), mask=offs < size)


@pytest.mark.parametrize("pool_dtype", FP8_TYPES)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_all_values_are_widened(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    codes = torch.arange(256, device=check_device()).to(torch.uint8).view(pool_dtype)
    widened = torch.empty(256, dtype=dtype, device=check_device())
    _widen_kernel[(1,)](kernel_view(codes), widened, NUM=256)
    expected = codes.to(dtype)
    assert torch.equal(widened.isnan(), expected.isnan())
    assert torch.equal(widened.isinf(), expected.isinf())
    expect_equal("widened", widened.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("pool_dtype", FP8_TYPES)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_floats_are_rounded(scale: float, pool_dtype: torch.dtype) -> None:
    """Values of FP8, what lies halfway between two, the neighbours of that, and beyond both ends."""
    values = FINITE[pool_dtype].float()
    middles = (values[1:] + values[:-1]) / 2
    around = [torch.nextafter(middles, torch.full((), limit)) for limit in (0.0, torch.inf)]
    extremes = torch.tensor([1e-30, 448.1, 465.0, 57345.0, 62000.0, 1e30, torch.inf, torch.nan])
    sizes = torch.cat([values, middles, *around, extremes, Inputs(0).normal(500).abs().cpu()])
    x = torch.cat([sizes, -sizes]).to(check_device()) * scale
    rounded = torch.empty(len(x), dtype=pool_dtype, device=x.device)
    _round_kernel[(triton.cdiv(len(x), 256),)](x, kernel_view(rounded), scale, len(x), NUM=256)
    expected, _ = to_fp8(x, x, KVScales(scale), pool_dtype)
    expect_equal("codes", rounded.view(torch.uint8) & 0x7F, expected.view(torch.uint8) & 0x7F)
    finite = ~x.isnan()
    expect_equal("signs", rounded.view(torch.uint8)[finite], expected.view(torch.uint8)[finite])


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_stored_k_and_v_are_rounded_from_the_models_type(dtype: torch.dtype) -> None:
    inputs, num_tokens, num_qo_heads, num_kv_heads, head_dim = Inputs(0), 9, 4, 2, 80
    qkv = inputs.normal(num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, std=30.0)
    slots, angles = 1 + inputs.permutation(num_tokens), inputs.normal(50, 10)
    weight = inputs.normal(head_dim, dtype=dtype)

    def stored(pool_dtype: torch.dtype) -> list[torch.Tensor]:
        shape = (num_tokens + 1, num_kv_heads, head_dim)
        buffers = [torch.zeros(shape, dtype=pool_dtype, device=check_device()) for _ in range(2)]
        qk_norm_rope_store(  # type: ignore[call-arg]
            qkv, torch.arange(num_tokens, device=qkv.device), torch.cat((angles.cos(), angles.sin()), -1),
            weight, weight, 1e-6, False, *buffers, slots, num_qo_heads, num_kv_heads, head_dim, SCALES[0],
        )  # fmt: skip
        return buffers

    for quantized, wanted in zip(stored(FP8), to_fp8(*stored(dtype), SCALES[0])):  # type: ignore[call-arg]
        expect_equal("stored", quantized.float(), wanted.float())
