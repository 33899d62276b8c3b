"""Clauses of quantized linear layers: dequantized weight and input, and the output."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import Collectives, Quantization, QuantizedLinear
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poisoned, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types.quant_scheme import FP4_VALUES, QuantScheme

SCHEMES = {
    "fp8 weight": QuantScheme("fp8"),
    "fp8 token": QuantScheme("fp8", inputs="token"),
    "fp8 static": QuantScheme("fp8", None, inputs="static"),
    "fp8 block": QuantScheme("fp8", 128, 128, "group"),
    "int8 token": QuantScheme("int8", inputs="token"),
    "int8 static": QuantScheme("int8", inputs="static"),
    "int4 32": QuantScheme("int4", group_size=32),
    "int4 128": QuantScheme("int4", group_size=128),
    "int4 32 zeros": QuantScheme("int4", group_size=32, symmetric=False),
    "int4 128 zeros": QuantScheme("int4", group_size=128, symmetric=False),
    "int4 channel": QuantScheme("int4"),
    "nvfp4": QuantScheme("nvfp4", group_size=16),
}


STD = {"fp8": 60.0, "int8": 70.0, "int4": 4.6, "mxfp4": 2.9, "nvfp4": 2.9}
"""Of the values of random codes."""


class Layer(Case):
    """A layer of random quantized weights."""

    num_tokens = 5
    out = 65
    size = 256
    dtype = torch.float32
    has_bias = False
    seed = 0

    def check(self) -> None:
        self.scheme.check("the layer", self.size)

    @property
    def scheme(self) -> QuantScheme:
        return SCHEMES[self.kind]

    def make(self, impl: Quantization) -> QuantizedLinear:
        """A layer whose ŵ has a standard deviation of about in_features^-0.5."""
        inputs, scheme = Inputs(self.seed), self.scheme
        with building(self.dtype):
            layer = impl.QuantizedLinear(self.size, self.out, scheme, self.has_bias)
        std = STD[scheme.weight_type] * self.size**0.5
        expected = scheme.tensors(self.out, self.size)
        for name, parameter in layer.named_parameters():
            shape, dtype = expected.get(name, ((self.out,), self.dtype))
            expect_equal(f"form of {name}", (parameter.shape, parameter.dtype), (torch.Size(shape), dtype))
            if name == "weight" and scheme.weight_type == "fp8":
                values = inputs.normal(*shape, std=60.0).clamp(-448, 448)
            elif name == "weight":
                is_int8 = scheme.weight_type == "int8"
                values = inputs.integers(256, *shape) - 128 * is_int8
            elif name == "weight_zero":
                values = inputs.integers(17, *shape)
            elif name == "input_scale":
                values = torch.tensor([2.0 / (448 if scheme.weight_type == "fp8" else 127)])
            elif name == "weight_global":
                values = (0.5 + inputs.uniform(*shape)) / torch.tensor([64 * std, 1.0]).to(check_device())
            elif name == "weight_scale" and scheme.weight_type == "nvfp4":
                values = 64 * (0.5 + inputs.uniform(*shape))
            elif name == "weight_scale":
                values = (0.5 + inputs.uniform(*shape)) / std
            else:
                values = inputs.normal(*shape)
            parameter.data.copy_(values.to(check_device()))
        return layer

    def draw(self, num_tokens: int | None = None) -> torch.Tensor:
        """Random tokens of different magnitudes, as a view into a larger tensor of NaN."""
        inputs = Inputs(self.seed + 1)
        num_tokens = self.num_tokens if num_tokens is None else num_tokens
        x = inputs.normal(num_tokens, self.size) * (0.2 + inputs.uniform(num_tokens, 1))
        return amid_poison(x.to(self.dtype))


def name_of_layer(kind: str, num_tokens: int, out: int, size: int, dtype: torch.dtype, has_bias: bool) -> str:
    return f"{kind}, {num_tokens} x {out} x {size}, {type_name(dtype)}{', bias' * has_bias}"


LAYERS = table(
    "kind num_tokens out size dtype has_bias",
    *(
        (kind, num_tokens, out, size, dtype, has_bias)
        for kind in SCHEMES
        for num_tokens, out, size, dtype, has_bias in (
            (1, 65, 256, torch.float32, False),
            (1, 160, 384, torch.bfloat16, False),
            (5, 1, 128, torch.float32, True),
            (17, 96, 640, torch.bfloat16, True),
            (66, 33, 256, torch.float16, False),
            (300, 48, 256, torch.bfloat16, True),
            (0, 64, 128, torch.float32, False),
        )
    ),
    *(
        (kind, 3, 70, size, torch.float32, False)
        for kind, size in (("fp8 token", 100), ("fp8 block", 320), ("fp8 block", 72), ("int8 token", 63),
                           ("int4 32", 96), ("int4 32 zeros", 32), ("fp8 weight", 33), ("nvfp4", 48))
    ),
    name=name_of_layer,
    of=Layer,
)  # fmt: skip
EVERY_KIND = table(
    "kind dtype",
    *((kind, dtype) for kind in SCHEMES for dtype in (torch.float32, torch.bfloat16)),
    name=lambda kind, dtype: f"{kind}, {type_name(dtype)}",
    of=Layer,
)
WITH_INPUTS = [case for case in EVERY_KIND if case.scheme.inputs != "none"]


def expected_weight(layer: QuantizedLinear) -> torch.Tensor:
    """ŵ in float64, value by value."""
    scheme, size = layer.scheme, layer.in_features
    scale = layer.weight_scale.double()
    if scheme.is_packed:
        unit = scheme.group_size or size
        k = torch.arange(size, device=scale.device)
        is_low = k % unit < unit // 2
        column = layer.weight[:, (k // unit * unit // 2) + k % unit % (unit // 2)].to(torch.int64)
        q = torch.where(is_low, column % 16, column // 16).double()
        zero = 8.0 if layer.weight_zero is None else layer.weight_zero.double()
        if scheme.weight_type == "nvfp4":
            assert layer.weight_global is not None
            q, zero = torch.tensor(FP4_VALUES, dtype=torch.float64, device=scale.device)[q.int()], 0.0
            factor, divisor = layer.weight_global.double().split(1, dim=1)
            scale = scale * factor / divisor
    else:
        q, zero = layer.weight.double(), 0.0
    group = torch.arange(size, device=scale.device) // (scheme.group_size or size)
    return (q - (zero if isinstance(zero, float) else zero[:, group])) * scale[:, group]


def expected_input(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """x̂ in float64, group by group; the quotient of x and its scale is a float32."""
    scheme, x = layer.scheme, x.float()
    if scheme.inputs == "none":
        return x.double()
    is_fp8 = scheme.weight_type == "fp8"
    parts = x.split(scheme.group_size if scheme.inputs == "group" else layer.in_features, dim=1)
    results = []
    for part in parts:
        largest = part.abs().amax(dim=1, keepdim=True)
        # On CUDA, torch divides by a tensor; by a number it multiplies by the rounded reciprocal.
        dynamic = largest / largest.new_full((), 448.0 if is_fp8 else 127.5)
        scale = layer.input_scale if scheme.inputs == "static" else dynamic
        quotient = (part / scale).nan_to_num(0.0)
        if is_fp8:
            q = quotient.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        else:
            q = quotient.round().clamp(-128.0, 127.0)
        results.append(q.double() * scale.double())
    return torch.cat(results, dim=1)


@contract("The result is x̂ @ ŵᵀ + bias, rounded to the type of x; x is not modified.", LAYERS)
def product(impl: Quantization, case: Layer) -> None:
    layer, x = case.make(impl), case.draw()
    before = x.clone()
    y = run_poisoned(layer, x)
    expected = expected_input(layer, x) @ expected_weight(layer).T
    if layer.bias is not None:
        expected = expected + layer.bias.double()
    expect_form("y", y, like=x.new_empty(len(x), case.out))
    expect_equal("x afterwards", x, before)
    expect_close("y", y, expected, tolerance("quantized linear", case.dtype))


@contract("dequantized_weight is ŵ in float32.", EVERY_KIND)
def weight(impl: Quantization, case: Layer) -> None:
    layer = case.make(impl)
    found = run_poisoned(layer.dequantized_weight)
    expected = expected_weight(layer).float()
    expect_form("ŵ", found, like=expected)
    expect_close("ŵ", found, expected, tolerance("elementwise", torch.float32))


@contract("dequantized_input is x̂ in float32.", EVERY_KIND)
def dequantized_input(impl: Quantization, case: Layer) -> None:
    layer, x = case.make(impl), case.draw()
    found = run_poisoned(layer.dequantized_input, x)
    expected = expected_input(layer, x)
    expect_equal("form of x̂", (found.shape, found.dtype), (x.shape, torch.float32))
    expect_close("x̂", found, expected, tolerance("elementwise", torch.float32))


@contract(
    "The quantized values of a token depend on no other token: their bits are the same alone and in a batch, "
    "and a token of NaN is NaN and leaves the results of the others as they are.",
    WITH_INPUTS,
)
def tokens_are_independent(impl: Quantization, case: Layer) -> None:
    layer, x = case.make(impl), case.draw(9)
    together = run_poisoned(layer.dequantized_input, x)
    x[3] = 100.0 * x[3].abs().amax() if case.scheme.inputs == "static" else poisoned((case.size,), x.dtype)
    with_nan = run_poisoned(layer.dequantized_input, x)
    y = run_poisoned(layer, x)
    expected = expected_input(layer, x) @ expected_weight(layer).T
    expect_true(
        "y of a token of NaN is NaN", case.scheme.inputs == "static" or bool(y[3].isnan().all()), y[3]
    )
    for row in (0, 4, 8):
        alone = run_poisoned(layer.dequantized_input, x[row : row + 1])[0]
        expect_close(f"x̂ of token {row} in a batch", together[row], alone.double(), EXACT)
        expect_close(f"x̂ of token {row} beside NaN", with_nan[row], alone.double(), EXACT)
        expect_close(f"y of token {row}", y[row], expected[row], tolerance("quantized linear", case.dtype))


@contract("A token of zeros, or a group of them, stays zero.", WITH_INPUTS)
def zeros(impl: Quantization, case: Layer) -> None:
    layer, x = case.make(impl), case.draw(3)
    x[1] = 0.0
    x[2, :128] = 0.0
    found = run_poisoned(layer.dequantized_input, x)
    expect_equal("x̂ of zeros", found[1], torch.zeros_like(found[1]))
    expect_equal("x̂ of a group of zeros", found[2, :128], torch.zeros_like(found[2, :128]))
    expect_equal(
        "y of zeros", run_poisoned(layer, x)[1], torch.zeros(case.out, dtype=case.dtype).to(x.device)
    )


@contract(
    "fp8: q is rounded to the nearest e4m3, ties to even, subnormal values included; int8: to the nearest "
    "integer, ties to even.",
    EXAMPLE,
)
def rounding(impl: Quantization, case: Case) -> None:
    fp8 = [448.0, 0.0, 17.0, 18.0, 19.0, 21.0, 23.0, -17.0, 1.0, 1.0625, 1.1875, 2**-9, 2**-10, 3 * 2**-10,
           2**-6 - 2**-10, -(2**-7) - 2**-11]  # fmt: skip
    int8 = [127.5, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.5, 0.49, 100.0, 3.0, -3.0, 7.0, 0.0, 1.0, 63.5]
    for kind, values in (("fp8 token", fp8), ("int8 token", int8)):
        case_of = Layer("", kind=kind, size=len(values))
        layer = case_of.make(impl)
        x = torch.tensor([values], device=check_device())
        found = run_poisoned(layer.dequantized_input, x)
        expect_close(f"x̂ of {kind}", found, expected_input(layer, x), tolerance("elementwise", x.dtype))


@contract(
    "Inputs beyond the range of a static scale are clamped to the largest values of the type.",
    grid("{kind}", kind=("fp8 static", "int8 static"), of=Layer),
)
def clamps(impl: Quantization, case: Layer) -> None:
    layer = case.make(impl)
    assert layer.input_scale is not None
    x = torch.full((2, case.size), 1e4, device=check_device())
    x[1] = -1e4
    found = run_poisoned(layer.dequantized_input, x) / layer.input_scale
    high, low = (448.0, -448.0) if case.scheme.weight_type == "fp8" else (127.0, -128.0)
    expected = torch.tensor([[high], [low]], dtype=torch.float64).expand(2, case.size)
    expect_close("q", found, expected.to(found.device), tolerance("elementwise", torch.float32))


@contract(
    "Rows of a layer do not touch each other: a scale changes the results of its output alone.", EXAMPLE
)
def outputs_are_independent(impl: Quantization, case: Case) -> None:
    case_of = Layer("", kind="fp8 block", out=130)
    layer, x = case_of.make(impl), case_of.draw()
    before = run_poisoned(layer, x).clone()
    layer.weight_scale.data[127] *= 2
    after = run_poisoned(layer, x)
    ratio = torch.ones(130, device=after.device)
    ratio[127] = 2
    expect_close("y", after, (before * ratio).double(), tolerance("quantized linear", torch.float32))


@contract(
    "With `tp`, the amax of a token is the largest of all ranks: the results of the ranks' parts, added, are "
    "that of one layer with all inputs.",
    table(
        "kind num_tokens",
        *((kind, num_tokens) for kind in ("fp8 token", "int8 token", "fp8 block") for num_tokens in (1, 5)),
        name=lambda kind, num_tokens: f"{kind}, {num_tokens} tokens",
        of=Layer,
    ),
)
def inputs_on_several_ranks(impl: Quantization, case: Layer) -> None:
    layer, x = case.make(impl), case.draw()
    x[:, : case.size // 2] *= 0.1  # rank 0 has the small inputs
    expected = run_poisoned(layer.dequantized_input, x)

    def run(tp: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        part = impl.QuantizedLinear(case.size // 2, case.out, case.scheme)
        part.tp = tp
        for name, parameter in part.named_parameters():
            whole = getattr(layer, name)  # [out, size], or scales of [out, groups]
            is_divided = whole.shape[1] > 1
            parameter.data = whole.chunk(2, dim=1)[tp.rank].contiguous() if is_divided else whole
        own = x.chunk(2, dim=1)[tp.rank].contiguous()
        return part.dequantized_input(own), part(own)

    parts = on_ranks(2, run, in_turn=True)
    expect_equal("x̂ of both ranks", torch.cat([x_hat for x_hat, _ in parts], dim=1), expected)
    product64 = expected_input(layer, x) @ expected_weight(layer).T
    expect_close("y", parts[0][1] + parts[1][1], product64, tolerance("quantized linear", case.dtype))
