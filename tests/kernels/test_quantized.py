"""Kernels of quantized linear layers beyond their contract: neighbours in one launch, GPUs without e4m3,
tiles."""

from __future__ import annotations

import pytest
import torch

from optimized import quantization as quantized_layers
from optimized.kernels import dequantize as dequantize_kernel
from optimized.kernels import quantize_input as quantize_kernel
from optimized.kernels import quantized_gemm as gemm_kernel
from optimized.kernels.dequantize import dequantize
from optimized.kernels.portable import Gpu
from optimized.kernels.quantize_input import quantize_input
from optimized.kernels.quantized_gemm import quantized_gemm
from optimized.kernels.quantized_gemv import GemvTile, quantized_gemv, suits_gemv
from optimized.kernels.quantized_tiles import Tile
from optimized.kernels.rms_norm import rms_norm
from optimized.kernels.silu_and_mul import silu_and_mul
from optimized.quantization import QuantizedLinear, QuantizedMergedLinear
from shared.conformance.compare import expect_close, expect_equal
from shared.conformance.contracts.quantization.linear import SCHEMES
from shared.conformance.device import building, check_device
from shared.conformance.inputs import HALF_TYPES, Inputs, type_name
from shared.conformance.poison import amid_poison, run_poisoned
from shared.conformance.tolerance import tolerance
from shared.loading.quantize import quantize_weight
from shared.modeling import quantization

HALF = torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(check_device(), dtype)


@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "int8 token"])
def test_norm_and_swiglu_are_those_of_their_own_kernels(kind: str) -> None:
    scheme, dtype = SCHEMES[kind], torch.float16  # the interpreter does not round bfloat16 in all kernels
    weight = draw(320, seed=1, dtype=dtype)
    x, gate_up = (amid_poison(draw(3, size, seed=size, dtype=dtype)) for size in (320, 640))
    for fused, plain in (
        (quantize_input(x, scheme, norm=(weight, 1e-5)), rms_norm(x, weight, 1e-5)),
        (quantize_input(gate_up, scheme, silu=True), silu_and_mul(gate_up)),
    ):
        expected = quantize_input(plain, scheme)
        expect_equal("q", fused.q.view(torch.uint8), expected.q.view(torch.uint8))
        expect_equal("scale", fused.scale, expected.scale)


@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32], ids=type_name)
@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "fp8 static", "int8 token", "int8 static"])
def test_codes_are_those_of_a_division(kind: str, dtype: torch.dtype) -> None:
    """The kernel divides by reciprocals: for tiny and huge scales too, beyond the range of a static one, and
    with the sign of zeros. Rows of one run of columns, and of two."""
    scheme, generator = SCHEMES[kind], torch.Generator().manual_seed(0)
    limits, exponents = torch.finfo(dtype), range(-130, 127, 8)
    for size in (384, 4608):
        exponent = torch.randint(-16, 1, (len(exponents), size), generator=generator).double()
        exponent += torch.tensor(exponents)[:, None]
        x = torch.randn(exponent.shape, generator=generator, dtype=torch.float64) * 2.0**exponent
        x = x.clamp(-limits.max, limits.max).to(dtype)
        if dtype == torch.bfloat16:
            x[x.abs() < limits.tiny] = 0.0  # Triton's interpreter widens subnormal ones wrongly
        x[:, 0], x[:, 1] = 0.0, -0.0
        groups = x.float().unflatten(1, (-1, 128 if scheme.inputs == "group" else size))
        if scheme.inputs == "static":
            scale = torch.tensor([1.7e-3])
            found = quantize_input(x.to(check_device()), scheme, scale.to(check_device()))
        else:
            found = quantize_input(x.to(check_device()), scheme)
            scale = groups.abs().amax(2) / (448.0 if scheme.weight_type == "fp8" else 127.5)
            expect_equal("scale", found.scale.cpu(), scale)
            scale = scale.where(scale != 0.0, 1.0)[:, :, None]
        quotient = (groups / scale).flatten(1)
        if scheme.weight_type == "fp8":
            expected = quotient.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        else:
            expected = quotient.round().clamp(-128, 127).to(torch.int8)
        expect_equal("q", found.q.cpu().view(torch.uint8), expected.view(torch.uint8))


def multiply(
    kind: str, num_tokens: int, tile: Tile | None = None, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A GEMM, and the same in float64."""
    scheme, x = SCHEMES[kind], draw(num_tokens, 256)
    tensors = quantize_weight(draw(100, 256, seed=3), scheme)
    weight, scale = tensors["weight"], tensors["weight_scale"].contiguous()
    y = torch.empty(num_tokens, 100, dtype=HALF, device=x.device) if residual is None else residual.clone()
    values = x if scheme.inputs == "none" else quantize_input(x, scheme)
    run_poisoned(
        lambda: quantized_gemm(
            values, weight, scale, None, scheme, y, residual=None if residual is None else y, tile=tile
        )
    )
    expected = quantization.dequantized_input(x, scheme, None).double()
    expected = expected @ quantization.dequantize(weight, scale, None, scheme).double().T
    return y, expected


@pytest.mark.parametrize(
    "kind", ["fp8 token", "fp8 block", "fp8 static", "int4 128", "int4 32", "int4 channel"]
)
@pytest.mark.parametrize(("size", "out"), [(256, 100), (1408, 9)])
@pytest.mark.parametrize("tile", [GemvTile(1, 2), GemvTile(4, 4, 2, 2)])
def test_gemv(kind: str, size: int, out: int, tile: GemvTile) -> None:
    """Rows and columns beyond the last tile, zero points, a bias and a residual."""
    scheme, x = SCHEMES[kind], draw(1, size)
    tile = tile._replace(steps=1) if scheme.weight_type == "int4" else tile
    static = torch.tensor([0.02], device=x.device) if scheme.inputs == "static" else None
    tensors = quantize_weight(draw(out, size, seed=3), scheme)
    weight, scale = tensors["weight"], tensors["weight_scale"].contiguous()
    zero = tensors.get("weight_zero")
    if scheme.weight_type == "int4" and zero is None and tile.rows > 1:
        zero = torch.arange(scale.numel(), device=x.device).view_as(scale).remainder(16).to(torch.uint8)
    bias, residual = draw(out, seed=5), draw(1, out, seed=6)
    values = x if scheme.inputs == "none" else quantize_input(x, scheme, static)
    assert suits_gemv(values, scheme, size)
    y = residual.clone()
    run_poisoned(
        lambda: quantized_gemv(values, weight, scale, zero, scheme, y, bias=bias, residual=y, tile=tile)
    )
    expected = quantization.dequantized_input(x, scheme, static).double()
    expected = expected @ quantization.dequantize(weight, scale, zero, scheme).double().T
    expect_close("y", y, expected + bias.double() + residual.double(), tolerance("quantized linear", HALF))


@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "fp8 weight"])
def test_gpus_without_e4m3_have_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, x = SCHEMES[kind], draw(4, 256)
    x[0] *= torch.logspace(-4, 0, 256, device=x.device)  # subnormal values
    codes = quantize_input(x, SCHEMES["fp8 token"]).q.view(torch.uint8)
    weight = quantize_weight(draw(64, 256), scheme)
    args = (weight["weight"], weight["weight_scale"].contiguous(), None, scheme, torch.float32)
    expected = dequantize(*args)
    for module in (quantize_kernel, gemm_kernel, dequantize_kernel):
        monkeypatch.setattr(module, "has_fp8", lambda device: False)
    expect_equal("codes", quantize_input(x, SCHEMES["fp8 token"]).q.view(torch.uint8), codes)
    expect_equal("ŵ", dequantize(*args), expected)
    y, product = multiply(kind, 5)
    expect_close("y", y, product, tolerance("quantized linear", HALF))


@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "int8 token", "int4 128", "int4 32"])
@pytest.mark.parametrize("tile", [Tile(16, 16, 32, 2), Tile(32, 32, 16, 3), Tile(64, 128, 64, 2, 8)])
@pytest.mark.full
def test_any_tile_gives_the_same(kind: str, tile: Tile) -> None:
    if kind == "int4 32" and tile.step > 16:
        tile = tile._replace(step=16)
    if not kind.startswith("int4"):
        tile = tile._replace(step=max(tile.step, 32))
    y, expected = multiply(kind, 37, tile)
    expect_close("y", y, expected, tolerance("quantized linear", HALF))


@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "int8 token"])
@pytest.mark.parametrize("parts", [2, 3, 8])  # of 8 three have no columns
def test_split_k(kind: str, parts: int) -> None:
    """Whole sums, with the same bits beside other tokens; the counters are zeros again."""
    scheme, x, residual = SCHEMES[kind], draw(19, 640), draw(19, 100, seed=7)
    tensors = quantize_weight(draw(100, 640, seed=3), scheme)
    weight, scale = tensors["weight"], tensors["weight_scale"].contiguous()

    def run(x: torch.Tensor) -> torch.Tensor:
        values, y = quantize_input(x, scheme), residual.clone()
        tile = Tile(32, 64, 128, 3, 4, parts)
        for _ in range(2):
            y.copy_(residual)
            run_poisoned(
                lambda: quantized_gemm(values, weight, scale, None, scheme, y, residual=y, tile=tile)
            )
        assert values.counters is not None
        assert not values.counters.any()
        return y

    y = run(x)
    expected = quantization.dequantized_input(x, scheme, None).double()
    expected = expected @ quantization.dequantize(weight, scale, None, scheme).double().T
    expect_close("y", y, expected + residual.double(), tolerance("quantized linear", HALF))
    other = run(torch.cat([x[:4], draw(15, 640, seed=9)]))
    expect_equal("tokens beside others", other[:4], y[:4])


def test_the_residual_is_added_before_rounding() -> None:
    residual = 64.0 * draw(3, 100, seed=7)
    y, expected = multiply("fp8 token", 3, residual=residual)
    expect_close("y", y, expected + residual.double(), tolerance("elementwise", HALF))


def test_tiles_shrink_to_the_shared_memory_of_a_gpu() -> None:
    small = Gpu((8, 6), 82, 99 * 1024)
    assert Tile(64, 64, 128, 6).fitted(1, small).stages == 5
    assert Tile(128, 128, 64, 5, 8).fitted(4, small).stages == 2
    assert Tile(16, 64, 64, 8).fitted(8, small, is_float32=True).stages == 6


def test_parts_of_a_merged_layer_have_their_own_scales() -> None:
    """Of weights, and static ones of the input."""
    scheme, inputs, parts = SCHEMES["fp8 static"], Inputs(5), {"q_proj": 24, "k_proj": 8}
    with building(torch.float32):
        merged = QuantizedMergedLinear(64, parts, scheme, bias=True)
        layers = {name: QuantizedLinear(64, out, scheme, bias=True) for name, out in parts.items()}
    x = inputs.normal(5, 64)
    for i, (name, layer) in enumerate(layers.items()):
        layer.weight.data.copy_(inputs.normal(*layer.weight.shape, std=60.0).clamp(-448, 448))
        layer.weight_scale.data.fill_(0.01 * (i + 1))
        assert layer.input_scale is not None
        layer.input_scale.data.fill_(0.004 / (i + 1))
        for parameter, tensor in layer.named_parameters():
            merged.weight_views()[f"{name}.{parameter}"].copy_(tensor)
    found = run_poisoned(merged, x)
    for name, y in merged.split(found).items():
        expect_equal(name, y, run_poisoned(layers[name], x))


@pytest.mark.parametrize("has_bias", [False, True])
def test_for_many_tokens_a_whole_weight_is_dequantized(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_layers, "MAX_WIDENED_TOKENS", 2)
    inputs = Inputs(3)
    with building(torch.float32):
        layer = QuantizedLinear(64, 24, SCHEMES["fp8 weight"], bias=has_bias)
    layer.weight.data.copy_(inputs.normal(*layer.weight.shape, std=60.0).clamp(-448, 448))
    layer.weight_scale.data.fill_(0.01)
    if layer.bias is not None:
        layer.bias.data.copy_(inputs.normal(24))
    x = inputs.normal(3, 64)
    few = torch.cat([layer(x[:2]), layer(x[2:])])
    expect_close("y", layer(x), few.double(), tolerance("elementwise", torch.float32))
