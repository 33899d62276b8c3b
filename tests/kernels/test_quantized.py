"""Kernels of quantized linear layers beyond their contract: GPUs without e4m3, tiles, split-K."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from diptych.optimized.kernels.linear import dequantize as dequantize_kernel
from diptych.optimized.kernels.linear import quantize_input as quantize_kernel
from diptych.optimized.kernels.linear import quantized_choice
from diptych.optimized.kernels.linear import quantized_gemm as gemm_kernel
from diptych.optimized.kernels.linear.dequantize import dequantize
from diptych.optimized.kernels.linear.quantize_input import quantize_input
from diptych.optimized.kernels.linear.quantized_choice import Dequantized, row_wise
from diptych.optimized.kernels.linear.quantized_gemm import quantized_gemm
from diptych.optimized.kernels.linear.quantized_gemv import GemvTile, quantized_gemv, suits_gemv
from diptych.optimized.kernels.linear.quantized_tiles import Tile, plan
from diptych.optimized.kernels.portable import Gpu
from diptych.optimized.quantized import quantized_layers
from diptych.optimized.quantized.quantized_layers import QuantizedLinear, QuantizedMergedLinear
from diptych.shared.config.quant_config import ONLINE
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.modeling import dequantized_values as exact
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.quantization.linear import SCHEMES
from tests.planted import Bug, Bugs

HALF = torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(check_device(), dtype)


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
    expected = exact.dequantized_input(x, scheme, None).double()
    expected = expected @ exact.dequantize(weight, scale, None, scheme).double().T
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
    expected = exact.dequantized_input(x, scheme, static).double()
    expected = expected @ exact.dequantize(weight, scale, zero, scheme).double().T
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


def room_of(rows: torch.Tensor) -> torch.Tensor:
    """The rows, and those that its memory has behind them."""
    num_rows = rows.untyped_storage().nbytes() // (rows.itemsize * rows.shape[1])
    return rows.as_strided((num_rows, rows.shape[1]), rows.stride())


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(128, 128), (129, 256), (255, 256), (300, 300)])
@pytest.mark.parametrize("kind", ["fp8 token", "fp8 static"])
def test_row_wise_multiplies_padding_too(
    kind: str, num_tokens: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its rows are, the rows of the tokens are right; without room there is no padding."""
    scheme, x = SCHEMES[kind], draw(num_tokens, 256)
    tensors = quantize_weight(draw(96, 256, seed=3), scheme)
    static = torch.full((1,), 0.01, device=x.device) if kind == "fp8 static" else None
    weight, scale = tensors["weight"], tensors["weight_scale"].float().expand(96, 1).contiguous()
    values = quantize_input(x, scheme, static)
    room_of(values.q)[num_tokens:].view(torch.uint8).fill_(0x7F)  # NaN
    if static is None:
        room_of(values.scale)[num_tokens:].fill_(float("nan"))
    expected = exact.dequantized_input(x, scheme, static).double()
    expected = expected @ (weight.double() * scale.double()).T
    multiplied: list[int] = []

    def scaled_mm(
        q: torch.Tensor, w: torch.Tensor, q_scale: torch.Tensor, w_scale: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        multiplied.append(len(q))
        return ((q.float() * q_scale) @ (w.float() * w_scale)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)  # not every build has it for a CPU
    for each in (values, replace(values, q=values.q.clone())):
        y = row_wise(each, weight, scale)
        expect_close("y", y, expected, tolerance("quantized linear", HALF))
    assert multiplied == [num_rows, num_tokens]


@pytest.mark.parametrize("kind", ["fp8 token", "int8 token"])
def test_a_measured_tile_adds_the_residual_of_many_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, x, residual = SCHEMES[kind], draw(70, 256), draw(70, 96, seed=7)
    tensors = quantize_weight(draw(96, 256, seed=3), scheme)
    with building(HALF):
        layer = QuantizedLinear(256, 96, scheme)
    layer.load_state_dict({name: value for name, value in tensors.items() if value is not None}, strict=True)
    without = residual + layer(x)
    tile = Tile(32, 64, 128, 3, 4, 2)
    for module in (quantized_layers, quantized_choice):
        monkeypatch.setattr(module, "measured_tile", lambda *_: tile)
    result = residual.clone()
    assert layer.add_to(result, x) is result
    expected = exact.dequantized_input(x, scheme, None).double()
    weight = exact.dequantize(layer.weight, layer.weight_scale, None, scheme)
    expect_close(
        "sum", result, expected @ weight.double().T + residual.double(), tolerance("quantized linear", HALF)
    )
    assert (result != without).any(), "the sum is rounded once, not twice"


@pytest.mark.parametrize("kind", ["int4 128", "nvfp4"])
@pytest.mark.parametrize("choice", [Dequantized(), Tile(16, 64, 64, 3, 4, 2)], ids=["dequantized", "split-K"])
def test_what_the_table_says_of_4_bits(
    kind: str, choice: Dequantized | Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole weight for cuBLAS, or parts of rows: with a bias, a residual, and twice."""
    scheme = ONLINE["nvfp4"] if kind == "nvfp4" else SCHEMES[kind]
    x, residual, bias = draw(18, 640), draw(18, 100, seed=7), draw(100, seed=8)
    with building(HALF):
        layer = QuantizedLinear(640, 100, scheme, bias=True)
    tensors = {**quantize_weight(draw(100, 640, seed=3) * 640**-0.5, scheme), "bias": bias}
    layer.load_state_dict(tensors, strict=False)
    layer.make_counters()
    for module in (quantized_layers, quantized_choice):
        monkeypatch.setattr(module, "measured_tile", lambda *_: choice)
    weight = exact.dequantize(layer.weight, layer.weight_scale, layer._zero, scheme)
    expected = x.double() @ weight.double().T + bias.double()
    for _ in range(2):
        expect_close("y", layer(x), expected, tolerance("quantized linear", HALF))
        added = layer.add_to(residual.clone(), x)
        expect_close("sum", added, expected + residual.double(), tolerance("quantized linear", HALF))
    assert layer.counters is not None
    assert not layer.counters.any()


def check_split_k(module: ModuleType, kind: str, parts: int, num_tokens: int = 19) -> None:
    """Whole sums, with the same bits beside other tokens; the counters are zeros again."""
    scheme, x, residual = SCHEMES[kind], draw(num_tokens, 640), draw(num_tokens, 100, seed=7)
    tensors = quantize_weight(draw(100, 640, seed=3), scheme)
    weight, scale = tensors["weight"], tensors["weight_scale"].contiguous()
    tile = Tile(32, 64, 128, 3, 4, parts)

    def run(x: torch.Tensor) -> torch.Tensor:
        values, y = quantize_input(x, scheme), residual.clone()
        for _ in range(2):
            y.copy_(residual)
            run_poisoned(
                lambda: module.quantized_gemm(values, weight, scale, None, scheme, y, residual=y, tile=tile)
            )
        assert values.counters is not None
        assert not values.counters.any()
        return y

    y = run(x)
    expected = exact.dequantized_input(x, scheme, None).double()
    expected = expected @ exact.dequantize(weight, scale, None, scheme).double().T
    expect_close("y", y, expected + residual.double(), tolerance("quantized linear", HALF))
    other = run(torch.cat([x[:4], draw(num_tokens - 4, 640, seed=9)]))
    expect_equal("tokens beside others", other[:4], y[:4])


@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "int8 token"])
@pytest.mark.parametrize("parts", [2, 3, 8])  # of 8 three have no columns
def test_split_k(kind: str, parts: int) -> None:
    check_split_k(gemm_kernel, kind, parts)


def test_split_k_of_several_tiles_of_tokens() -> None:
    check_split_k(gemm_kernel, "fp8 token", 3, num_tokens=70)


def test_what_is_cut_into_parts() -> None:
    """Long rows of few outputs, multiplied in e4m3 by one scale for each token."""

    def parts_of(out: int, size: int, kind: str = "fp8 token") -> list[int]:
        return [plan(num_tokens, out, SCHEMES[kind], size).parts for num_tokens in (8, 16, 33, 64, 65)]

    assert parts_of(4096, 12288) == [1, 2, 3, 3, 1]
    assert parts_of(4096, 4096) == [1, 2, 2, 2, 1]
    assert parts_of(512, 32768) == [1, 4, 4, 4, 1]
    assert parts_of(4104, 12288) == parts_of(4096, 4032) == [1, 1, 1, 1, 1]
    assert parts_of(4096, 12288, "fp8 block") == parts_of(4096, 12288, "int8 token") == [1, 1, 1, 1, 1]


SPLIT_K_BUGS = Bugs("split-K of quantized GEMMs", "quantized_gemm", "check_split_k")
for _name, _words in {
    "a part goes on to the end": ("tl.minimum(first_byte + part_bytes, row_bytes)", "row_bytes"),
    "parts are written over each other": ("tl.program_id(1) * (ROWS * TOKENS) + place", "place"),
    "the last part is left out": ("tl.static_range(1, PARTS)", "tl.static_range(1, PARTS - 1)"),
    "counters stay": ("tl.store(counters_ptr + tl.program_id(0), 0)", "pass"),
}.items():
    _entry = "optimized.kernels.linear.quantized_gemm"
    SPLIT_K_BUGS.words(_name, _entry, (_entry, *_words))


@SPLIT_K_BUGS.found_by(AssertionError)
def test_planted_bugs_of_split_k(bug: Bug) -> None:
    check_split_k(bug.planted, "fp8 token", 3)


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
    """Weights have scales, and the input has static ones."""
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
        assert layer.bias is not None
        layer.bias.data.copy_(inputs.normal(len(layer.bias)))
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
