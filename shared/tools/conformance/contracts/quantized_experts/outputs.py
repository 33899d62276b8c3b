"""Clauses of routed experts whose weights are quantized."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from diptych.shared.interfaces import Collectives, TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts
from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
)
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import amid_poison, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.moe.expected import clamped_swiglu64, silu_and_mul64
from diptych.shared.tools.conformance.contracts.quantization.linear import (
    SCHEMES,
    STD,
    expected_input,
    expected_weight,
)
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types.quant_scheme import FP4_VALUES, QuantScheme

KINDS = {
    **SCHEMES,
    "mxfp4": QuantScheme("mxfp4", group_size=32),
}


class Experts(Case):
    """Tokens choose among the first `num_used` of 5 experts; the others hold NaN or the largest values. Some
    choices are padding, -1."""

    num_used = 4
    num_chosen = 2
    hidden_size = 128
    intermediate_size = 96
    dtype = torch.float32
    bias = False
    swiglu_limit = 0.0
    seed = 0

    @property
    def scheme(self) -> QuantScheme:
        return KINDS[self.kind]

    def make(self, impl: type[QuantizedExperts]) -> QuantizedExperts:
        inputs, scheme = Inputs(self.seed), self.scheme
        sizes = 5, self.hidden_size, self.intermediate_size
        with building(self.dtype):
            experts = impl(*sizes, scheme, self.bias, self.swiglu_limit)
        for name, parameter in experts.named_parameters():
            size = self.hidden_size if name.startswith("w13") else self.intermediate_size
            values = self._values(name, parameter, size, inputs)
            parameter.data.copy_(values.to(parameter.dtype))
            parameter.data[self.num_used :].view(torch.uint8).fill_(255)
        return experts

    def _values(self, name: str, like: torch.Tensor, size: int, inputs: Inputs) -> torch.Tensor:
        weight_type, shape = self.scheme.weight_type, like.shape
        if name.endswith("_input"):  # 100 times as large for expert 3 as for expert 0, and different for up
            of_experts = 10.0 ** torch.linspace(-1, 5 / 3, len(like), device=check_device())[:, None]
            return of_experts * (0.5 + inputs.uniform(*shape)) / (448 if weight_type == "fp8" else 127)
        if name.endswith("_zero"):
            return inputs.integers(17, *shape)
        if name.endswith("_global"):
            std = torch.tensor([64 * STD[weight_type] * size**0.5, 1.0])
            return (0.5 + inputs.uniform(*shape)) / std.to(check_device())
        if name.endswith("_scale") and weight_type == "nvfp4":
            return 64 * (0.5 + inputs.uniform(*shape))
        if name.endswith("_scale"):
            scale = (0.5 + inputs.uniform(*shape)) / (STD[weight_type] * size**0.5)
            return scale.log2().round() + 127 if weight_type == "mxfp4" else scale
        if name.startswith("b"):
            return inputs.normal(*shape)
        if weight_type == "fp8":
            return inputs.normal(*shape, std=60.0).clamp(-448, 448)
        return inputs.integers(256, *shape) - 128 * (weight_type == "int8")

    def topk(self, inputs: Inputs) -> TopKOutput:
        shape = self.num_tokens, self.num_chosen
        ids = [inputs.permutation(self.num_used)[: self.num_chosen] for _ in range(self.num_tokens)]
        all_ids = torch.stack(ids) if ids else inputs.integers(self.num_used, *shape)
        all_ids = torch.where(inputs.uniform(*shape) < 0.15, -1, all_ids)
        return TopKOutput(inputs.uniform(*shape), all_ids.to(torch.int32))


def expected(case: Experts, experts: QuantizedExperts, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
    """The expected output in float64, expert by expert over dequantized weights. Intermediate values are
    rounded to the type of x."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for e in range(case.num_used):
        rows, choices = (topk.topk_ids == e).nonzero(as_tuple=True)
        hidden = x[rows].contiguous()
        for name, bias in (("w13", experts.b13), ("w2", experts.b2)):
            layer: Any = SimpleNamespace(
                scheme=case.scheme, in_features=hidden.shape[1], weight=getattr(experts, name)[e],
                weight_scale=getattr(experts, f"{name}_scale")[e], weight_zero=None, input_scale=None,
            )  # fmt: skip
            if case.scheme.inputs == "static":
                layer.input_scale = max(getattr(experts, f"{name}_input")[e])
            layer.weight_global = None
            if case.kind == "nvfp4":
                layer.weight_global = getattr(experts, f"{name}_global")[e]
            if not case.scheme.symmetric:
                layer.weight_zero = getattr(experts, f"{name}_zero")[e]
            weight = _mxfp4_weight(layer) if case.kind == "mxfp4" else expected_weight(layer)
            result = expected_input(layer, hidden) @ weight.T
            result = result if bias is None else result + bias[e].double()
            if name == "w13":
                limit = case.swiglu_limit
                act = clamped_swiglu64(result, limit) if limit > 0 else silu_and_mul64(result)
                hidden = act.to(x.dtype)
        y.index_add_(0, rows, result * topk.topk_weights[rows, choices, None].double())
    return y


def _mxfp4_weight(layer: Any) -> torch.Tensor:
    """ŵ in float64, value by value."""
    k = torch.arange(layer.in_features, device=layer.weight.device)
    column = layer.weight[:, k // 32 * 16 + k % 16].to(torch.int64)
    code = torch.where(k % 32 < 16, column % 16, column // 16)
    values = torch.tensor(FP4_VALUES, dtype=torch.float64, device=code.device)[code]
    return values * 2.0 ** (layer.weight_scale[:, k // 32].double() - 127)


def name_of(kind: str, num_tokens: int, hidden_size: int, intermediate_size: int, **more: Any) -> str:
    names = (
        type_name(value) if isinstance(value, torch.dtype) else f"{key} {value}"
        for key, value in more.items()
    )
    return ", ".join([kind, f"{num_tokens} tokens", f"{hidden_size}-{intermediate_size}", *names])


EVERY_KIND = table(
    "kind num_tokens hidden_size intermediate_size dtype",
    *(
        (kind, num_tokens, hidden, inter, dtype)
        for kind in KINDS
        for num_tokens, hidden, inter, dtype in (
            (1, 128, 256, torch.float32),
            (23, 256, 128, torch.bfloat16),
            (40, 128, 128, torch.float32),
        )
    ),
    *(
        (kind, 9, 160, 96, torch.float32)
        for kind in ("fp8 token", "fp8 block", "fp8 weight", "int8 token", "int4 32 zeros", "mxfp4", "nvfp4")
    ),
    ("fp8 block", 0, 128, 128, torch.float32),
    name=name_of,
    of=Experts,
)  # fmt: skip
LIKE_GPT_OSS = table(
    "kind num_tokens hidden_size intermediate_size dtype bias swiglu_limit",
    ("mxfp4", 11, 96, 64, torch.float32, True, 7.0),
    ("mxfp4", 70, 192, 96, torch.bfloat16, True, 2.0),
    ("fp8 token", 5, 96, 64, torch.float32, True, 2.0),
    name=name_of,
    of=Experts,
)
ONE_HOT = table(
    "kind num_tokens hidden_size intermediate_size dtype num_used num_chosen",
    ("fp8 block", 70, 128, 128, torch.float32, 1, 1),
    ("int4 128", 33, 128, 128, torch.bfloat16, 1, 1),
    ("mxfp4", 70, 64, 32, torch.float32, 1, 1),
    name=name_of,
    of=Experts,
)


@contract(
    "y[t] is the weighted sum of its experts' outputs, each with quantized weights and inputs; a choice of "
    "-1 adds nothing; x is not modified; experts without tokens are not read.",
    (*EVERY_KIND, *LIKE_GPT_OSS, *ONE_HOT),
)
def quantized_output(impl: type[QuantizedExperts], case: Experts) -> None:
    experts, inputs = case.make(impl), Inputs(case.seed + 1)
    topk = case.topk(inputs)
    x = amid_poison(inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype))
    before = x.clone()
    y = run_poisoned(experts, x, topk)
    expect_form("y", y, like=x)
    expect_equal("x afterwards", x, before)
    row = "moe" if case.scheme.inputs == "none" else "quantized moe"
    expect_close("y", y, expected(case, experts, x, topk), tolerance(row, case.dtype))


@contract(
    "The result of a token depends on no other token: its bits are the same beside a token of NaN.",
    table(
        "kind num_tokens hidden_size intermediate_size dtype",
        *((kind, 6, 128, 128, torch.float32) for kind in ("fp8 token", "fp8 block", "int8 token", "mxfp4")),
        name=name_of,
        of=Experts,
    ),
)
def tokens_of_experts_are_independent(impl: type[QuantizedExperts], case: Experts) -> None:
    experts, inputs = case.make(impl), Inputs(case.seed + 1)
    topk, x = case.topk(inputs), inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    together = run_poisoned(experts, x, topk)
    x[2] = torch.nan
    beside_nan = run_poisoned(experts, x, topk)
    others = torch.arange(case.num_tokens, device=check_device()) != 2
    expect_equal("the other tokens", beside_nan[others], together[others])


@contract(
    "A static scale of x is that of the expert, the larger of gate and up, whatever other experts have; that "
    "of w2's inputs too. Experts that change places, with all parameters, give the same results.",
    table(
        "kind num_tokens dtype",
        *(
            (kind, num_tokens, dtype)
            for kind in ("fp8 static", "int8 static")
            for num_tokens, dtype in ((1, torch.float32), (40, torch.float32), (23, torch.bfloat16))
        ),
        name=lambda kind, num_tokens, dtype: f"{kind}, {num_tokens} tokens, {type_name(dtype)}",
        of=Experts,
    ),
)
def static_scales_of_experts(impl: type[QuantizedExperts], case: Experts) -> None:
    experts, inputs = case.make(impl), Inputs(case.seed + 1)
    expect_equal("scales of inputs", (experts.w13_input.shape, experts.w2_input.shape), ((5, 2), (5, 1)))
    topk = case.topk(inputs)
    x = amid_poison(inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype))
    y = run_poisoned(experts, x, topk)
    expect_close("y", y, expected(case, experts, x, topk), tolerance("quantized moe", case.dtype))
    places = torch.tensor([3, 0, 4, 1, 2], device=x.device)  # of experts 0 to 4
    for parameter in experts.parameters():
        parameter.data.view(torch.uint8)[places] = parameter.data.view(torch.uint8).clone()
    ids = torch.where(topk.topk_ids < 0, -1, places[topk.topk_ids.long()])
    moved = run_poisoned(experts, x, topk._replace(topk_ids=ids.to(torch.int32)))
    expect_close("y behind the move", moved, y.double(), tolerance("quantized moe of ranks", case.dtype))


@contract(
    "With `tp`, the amax of a pair is the largest of all ranks: the results of the ranks' parts of the "
    "intermediate size, added, are those of whole experts.",
    table(
        "kind num_tokens intermediate_size",
        *((kind, num_tokens, 128) for kind in ("fp8 token", "int8 token") for num_tokens in (1, 9)),
        ("fp8 static", 9, 128),
        name=lambda kind, num_tokens, intermediate_size: f"{kind}, {num_tokens} tokens",
        of=Experts,
    ),
)
def experts_on_several_ranks(impl: type[QuantizedExperts], case: Experts) -> None:
    experts, inputs = case.make(impl), Inputs(case.seed + 1)
    half = case.intermediate_size // 2
    experts.w13_scale.data.view(5, 4, half, 1)[:, 0] *= 0.1  # gates of rank 0: its activations are small
    topk, x = case.topk(inputs), inputs.normal(case.num_tokens, case.hidden_size)

    def run(tp: Collectives) -> torch.Tensor:
        with building(case.dtype):
            part = impl(5, case.hidden_size, half, case.scheme)
        part.tp = tp
        for name, view in part.weight_views().items():
            whole = experts.weight_views()[name]
            dim = 1 if "down_proj" in name else 0
            is_divided = whole.dim() > dim and whole.shape[dim] == case.intermediate_size
            view.copy_(whole.chunk(2, dim=dim)[tp.rank] if is_divided else whole)
        return part(x, topk)

    parts = on_ranks(2, run, in_turn=True)
    expected = experts(x, topk).double()
    expect_close("y", parts[0] + parts[1], expected, tolerance("quantized moe of ranks", case.dtype))
