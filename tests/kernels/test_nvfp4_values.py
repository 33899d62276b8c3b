"""NVFP4 in the kernels that multiply it: every code with every scale, exactly."""

from __future__ import annotations

import pytest
import torch

from diptych.optimized.kernels.linear import quantized_gemm as gemm_kernel
from diptych.optimized.kernels.linear import quantized_gemv as gemv_kernel
from diptych.optimized.kernels.linear.dequantize import dequantize
from diptych.optimized.kernels.linear.quantized_gemm import MAX_TILES, quantized_gemm
from diptych.optimized.kernels.linear.quantized_gemv import GemvTile, quantized_gemv, suits_gemv
from diptych.optimized.kernels.linear.quantized_tiles import Tile
from diptych.optimized.quantized.quantized_layers import QuantizedMergedLinear
from diptych.optimized.quantized.quantized_moe import QuantizedExperts
from diptych.shared.interfaces import TopKOutput
from diptych.shared.loading.quantized_formats import pack_units
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.types.quant_scheme import FP4_VALUES, QuantScheme

SCHEME = QuantScheme("nvfp4", group_size=16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8)
"""All of e4m3 but NaN, which loading refuses."""


def every_value(num_groups: int = 2) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight of 127 outputs in which each scale has all 16 codes in a group, and what it stands for, in
    float64. Factors and divisors of outputs are powers of two."""
    scale = SCALES.view(torch.float8_e4m3fn).reshape(-1, num_groups)
    out = len(scale)
    codes = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(out)])
    codes = codes.repeat(1, num_groups)
    values = torch.tensor(FP4_VALUES, dtype=torch.float64)[codes]
    values *= scale.double().repeat_interleave(16, dim=1)
    both = torch.tensor([[2.0 ** (i % 5 - 2), 2.0 ** (i % 3)] for i in range(out)])
    tensors = {"weight": pack_units(codes.to(torch.uint8), 16), "weight_scale": scale, "weight_global": both}
    tensors = {name: tensor.to(check_device()) for name, tensor in tensors.items()}
    return tensors, (values * (both[:, :1] / both[:, 1:])).to(check_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("native", [True, False])
def test_every_code_with_every_scale(
    dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One input of 1 picks a weight. All have few bits: any difference is an error."""
    if not native:
        for module in (gemm_kernel, gemv_kernel):
            monkeypatch.setattr(module, "has_fp8", lambda device: False)
    tensors, expected = every_value()
    given = tensors["weight"], tensors["weight_scale"], tensors["weight_global"], SCHEME
    assert torch.equal(dequantize(*given, torch.float32).double(), expected)
    out, size = expected.shape
    x = torch.eye(size, dtype=dtype, device=check_device())
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=x.device)
    y = torch.empty(size, out, dtype=dtype, device=x.device)
    for tile in (None, Tile(16, 64, 16, 2), Tile(32, 16, 64, 3, 1), Tile(16, 64, 8, 2, 2, 2)):
        quantized_gemm(x, *given, y.fill_(torch.nan), tile=tile, counters=counters)
        assert torch.equal(y.double(), expected.T), tile
    assert not counters.any()
    assert suits_gemv(x[:1], SCHEME, size)
    assert not suits_gemv(x[:1, :16], SCHEME, 16)
    y.fill_(torch.nan)
    for i in (0, 7, 8, 15, 16, 22, 29, 31):
        quantized_gemv(x[i : i + 1], *given, y[i : i + 1], tile=GemvTile(2, 64))
        assert torch.equal(y[i].double(), expected[:, i]), i


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_with_every_scale_in_experts(dtype: torch.dtype) -> None:
    """The first GEMM makes 96 times the input, whose gate is so large that silu leaves it; the second one has
    the values. The weight of the expert, 1 / 96, is rounded, and the result is."""
    tensors, expected = every_value()
    with building(dtype):
        experts = QuantizedExperts(1, 32, 16, SCHEME)
    for parameter in experts.parameters():
        parameter.data.view(torch.uint8).zero_()
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[:16, 16] = 7  # gate: 6 * 16 = 96
    codes[torch.arange(16, 32), torch.arange(16)] = 2  # up: x[i]
    experts.w13.data[0] = pack_units(codes, 16)
    experts.w13_scale.data[0] = 1.0
    experts.w13_global.data[0] = 1.0
    for first in (0, 31, 62, 93, len(expected) - 32):
        for group in range(2):
            rows = slice(first, first + 32)
            part = expected[rows, 16 * group : 16 * group + 16]
            experts.w2.data[0] = tensors["weight"][rows, 8 * group : 8 * group + 8]
            experts.w2_scale.data[0] = tensors["weight_scale"][rows, group : group + 1]
            experts.w2_global.data[0] = tensors["weight_global"][rows]
            x = torch.zeros(16, 32, dtype=dtype, device=check_device())
            x[:, :16] = torch.eye(16)
            x[:, 16] = 16.0  # silu(96) = 96
            ids = torch.zeros(16, 1, dtype=torch.int32, device=x.device)
            y = experts(x, TopKOutput(torch.full((16, 1), 1 / 96, device=x.device), ids))
            limit = torch.finfo(dtype).eps * part.abs().T  # two roundings of half an eps
            assert bool(((y.double() - part.T).abs() <= limit).all())


def test_merged_layers_keep_their_scales() -> None:
    """Odd shapes, a bias, and parts of different factors and divisors."""
    tensors, expected = every_value()
    parts = {"q": 100, "k": 27}
    with building(torch.float32):
        layer = QuantizedMergedLinear(32, parts, SCHEME, bias=True)
    for name, tensor in tensors.items():
        getattr(layer, name).data.copy_(tensor)
    assert layer.bias is not None
    layer.bias.data.copy_(torch.arange(127.0))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(check_device())
    wanted = x.double() @ expected.T + torch.arange(127.0, device=x.device).double()
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-2)  # of sums up to 10,000
    views = layer.weight_views()
    assert torch.equal(views["k.weight_global"], tensors["weight_global"][100:])
