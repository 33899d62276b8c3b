"""Clauses of the routed experts, and of the whole MoE layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.config import MoEConfig
from diptych.shared.config.model import HiddenAct
from diptych.shared.interfaces import FusedExperts, MoE, TopKOutput
from diptych.shared.interfaces.layers import MergedLinear
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_form
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poison_, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance
from diptych.shared.tools.conformance.contracts.moe.expected import experts64, silu_and_mul64
from diptych.shared.tools.conformance.contracts.moe.routing import (
    ROUTINGS,
    Routing,
    biased,
    make_moe,
    route_all64,
)


class Experts(Case):
    """Tokens choose among the first `num_used` experts; the others hold NaN."""

    bias = False
    swiglu_limit = 0.0
    hidden_act: HiddenAct = "silu"
    seed = 0

    def check(self) -> None:
        if not 1 <= self.num_chosen <= self.num_used <= self.num_experts:
            raise ValueError("1 <= num_chosen <= num_used <= num_experts")
        if min(self.hidden_size, self.intermediate_size) < 1:
            raise ValueError("sizes must be at least 1")

    def make(self, impl: type[MoE], inputs: Inputs) -> FusedExperts:
        config = MoEConfig(
            self.num_experts,
            self.num_chosen,
            self.intermediate_size,
            norm_topk_prob=False,
            bias=self.bias,
            swiglu_limit=self.swiglu_limit,
            hidden_act=self.hidden_act,
        )
        experts = make_moe(impl, config, self.hidden_size, self.dtype).experts
        inputs.fill_(experts)
        for parameter in experts.parameters():
            poison_(parameter.data[self.num_used :])
        return experts

    def topk(self, inputs: Inputs) -> TopKOutput:
        drawn = [inputs.permutation(self.num_used)[: self.num_chosen] for _ in range(self.num_tokens)]
        ids = torch.stack(drawn) if drawn else inputs.integers(self.num_used, 0, self.num_chosen)
        return TopKOutput(inputs.uniform(self.num_tokens, self.num_chosen), ids.to(torch.int32))


SIZES = "num_tokens num_experts num_used num_chosen hidden_size intermediate_size dtype"


def name_of_experts(num_experts: int, num_used: int, dtype: torch.dtype, **sizes: int) -> str:
    return (
        "{num_tokens} tokens, {num_chosen} of {num_experts} experts, {num_empty} empty, "
        "{hidden_size}-{intermediate_size}, {dtype}"
    ).format(num_experts=num_experts, num_empty=num_experts - num_used, dtype=type_name(dtype), **sizes)


EXPERTS = table(
    SIZES,
    *(
        (*sizes, dtype)
        for dtype in FLOAT_TYPES
        for sizes in (
            (1, 5, 5, 2, 33, 20),
            (13, 5, 4, 3, 64, 63),
            (40, 9, 1, 1, 48, 24),
            (3, 64, 60, 8, 127, 33),
            (130, 8, 3, 2, 128, 129),
            (65, 1, 1, 1, 16, 1),
            (0, 5, 5, 2, 32, 16),
        )
    ),
    name=name_of_experts,
    of=Experts,
)


@contract(
    "y[t] is the weighted sum of its experts' outputs; x is not modified; empty experts are not read.",
    EXPERTS,
)
def fused_experts(impl: type[MoE], case: Experts) -> None:
    inputs = Inputs(case.seed)
    module, topk = case.make(impl, inputs), case.topk(inputs)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    expect_equal("w13", shapes["w13"], (case.num_experts, 2 * case.intermediate_size, case.hidden_size))
    expect_equal("w2", shapes["w2"], (case.num_experts, case.hidden_size, case.intermediate_size))
    x = amid_poison(inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype))
    before = x.clone()
    y = run_poisoned(module, x, topk)
    expect_form("y", y, like=x)
    expect_equal("x afterwards", x, before)
    expect_close("y", y, experts64(x, topk, module.w13, module.w2), tolerance("moe", case.dtype))


@contract(
    "With biases and a clamped SwiGLU, as in GPT-OSS: act = gate * sigmoid(1.702 gate) * (up + 1), gate and "
    "up clamped before; the second bias is weighted as the rest. An implementation without them refuses.",
    tuple(
        case
        for bias, limit in ((True, 1.5), (True, 0.0), (False, 0.75))
        for case in table(
            SIZES,
            *((n, 6, 5, 3, 40, 24, dtype) for dtype in FLOAT_TYPES for n in (1, 9, 70)),
            name=f"{{num_tokens}} tokens, {'biases' * bias or 'no biases'}, limit {limit:g}, {{dtype}}",
            of=Experts,
            bias=bias,
            swiglu_limit=limit,
        )
    ),
)
def biases_and_clamps(impl: type[MoE], case: Experts) -> None:
    """Every third token has a padding choice, for which the bias must not be added either."""
    inputs = Inputs(case.seed)
    try:
        module = case.make(impl, inputs)
    except ValueError:
        return
    topk = case.topk(inputs)
    topk.topk_ids[::3, 1] = -1
    for bias in (module.b13, module.b2):
        if bias is not None:
            bias.data[: case.num_used] = inputs.normal(case.num_used, bias.shape[1], dtype=case.dtype)
    x = inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    expected = experts64(x, topk, module.w13, module.w2, module.b13, module.b2, case.swiglu_limit)
    expect_close("y", run_poisoned(module, x, topk), expected, tolerance("moe", case.dtype))


@contract(
    "With hidden_act gelu_tanh, as in Gemma 4, act = gelu(gate) * up. An implementation without it refuses.",
    table(
        SIZES,
        *((n, 6, 5, 3, 40, 24, dtype) for dtype in FLOAT_TYPES for n in (1, 9, 70)),
        name="{num_tokens} tokens, {dtype}",
        of=Experts,
        hidden_act="gelu_tanh",
    ),
)
def experts_with_gelu(impl: type[MoE], case: Experts) -> None:
    inputs = Inputs(case.seed)
    try:
        module = case.make(impl, inputs)
    except ValueError:
        return
    if module.hidden_act != case.hidden_act:
        return  # a model refuses these experts
    topk, x = case.topk(inputs), inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    expected = experts64(x, topk, module.w13, module.w2, hidden_act=case.hidden_act)
    expect_close("y", run_poisoned(module, x, topk), expected, tolerance("moe", case.dtype))


@contract(
    "An id of -1 contributes nothing, whatever its weight; a token of nothing else gets zeros.",
    table(
        SIZES,
        *((n, 5, 4, 2, 40, 24, dtype) for dtype in FLOAT_TYPES for n in (3, 9, 70)),
        name="{num_tokens} tokens, {dtype}",
        of=Experts,
    ),
)
def padding(impl: type[MoE], case: Experts) -> None:
    """The last expert holds NaN, which an id of -1 that wraps around would read."""
    inputs = Inputs(case.seed)
    module, topk = case.make(impl, inputs), case.topk(inputs)
    for token in range(case.num_tokens):
        if token % 3 != 2:
            topk.topk_ids[token, : token % 3 + 1] = -1
    poison_(topk.topk_weights[: case.num_tokens - 1 : 4])
    topk.topk_weights[topk.topk_ids >= 0] = 0.5
    x = inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    is_padding = (topk.topk_ids == -1).all(dim=1)
    y = run_poisoned(module, x, topk)
    expect_close("y", y, experts64(x, topk, module.w13, module.w2), tolerance("moe", case.dtype))
    expect_close("tokens without an expert", y[is_padding], torch.zeros_like(x[is_padding]), EXACT)


@contract("All tokens may go to one expert, the last one too.", tuple(e for e in EXPERTS if e.num_tokens > 1))
def one_expert(impl: type[MoE], case: Experts) -> None:
    inputs = Inputs(case.seed)
    module, topk = case.make(impl, inputs), case.topk(inputs)
    for parameter in module.parameters():
        parameter.data[-1] = inputs.normal(*parameter.shape[1:], std=parameter.shape[-1] ** -0.5)
        poison_(parameter.data[:-1])
    topk = TopKOutput(topk.topk_weights[:, :1], torch.full_like(topk.topk_ids[:, :1], case.num_experts - 1))
    x = inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    y = run_poisoned(module, x, topk)
    expect_close("y", y, experts64(x, topk, module.w13, module.w2), tolerance("moe", case.dtype))


@contract(
    "Weights multiply in float32: some fit no half type.",
    table(
        SIZES,
        *((n, 6, 6, 3, 64, 32, dtype) for dtype in FLOAT_TYPES for n in (1, 20)),
        name="{num_tokens} tokens, {dtype}",
        of=Experts,
    ),
)
def weights_in_float32(impl: type[MoE], case: Experts) -> None:
    """Weights of 100,000 (float16 ends at 65,504) and of 1e-6 (where it has four bits left), with experts
    scaled so that y stays near one."""
    for scale in (1e5, 1e-6):
        inputs = Inputs(case.seed)
        module, topk = case.make(impl, inputs), case.topk(inputs)
        x = inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
        module.w2.data.copy_(module.w2.double() / (scale**0.5))
        unit = scale**0.5
        topk = TopKOutput(topk.topk_weights * scale, topk.topk_ids)
        y = run_poisoned(module, x, topk).double() / unit
        expected = experts64(x, topk, module.w13, module.w2) / unit
        expect_close(f"y / {unit:g}, weights of {scale:g}", y, expected, tolerance("moe", case.dtype))


@contract("Tokens do not touch each other: one of NaN leaves the others as they are.", EXAMPLE)
def tokens_are_independent(impl: type[MoE], case: Case) -> None:
    inputs = Inputs(0)
    (shape,) = table(SIZES, ("", 12, 5, 5, 2, 40, 24, torch.float32), of=Experts)
    module, topk = shape.make(impl, inputs), shape.topk(inputs)
    x = inputs.normal(12, 40)
    poison_(x[4])
    y = run_poisoned(module, x, topk)
    expect_close("y", y, experts64(x, topk, module.w13, module.w2), tolerance("moe", torch.float32))


class Layer(Case):
    """A whole MoE layer. In half types every expert is chosen, so that a rounded logit cannot change the
    choice."""

    shared_intermediate_size = 0
    shared_expert_gate = False
    bias = False
    weight_on_input = False
    dtype = torch.float32
    hidden_size = 40
    seed = 0

    def config(self) -> MoEConfig:
        return replace(
            self.routing.config(),
            shared_intermediate_size=self.shared_intermediate_size,
            shared_expert_gate=self.shared_expert_gate,
            weight_on_input=self.weight_on_input,
            bias=self.bias,
            swiglu_limit=1.5 if self.bias else 0.0,
        )


ALL = Routing("all", num_experts_per_tok=7, norm_topk_prob=True, num_tokens=33)
LAYERS = (
    *(Layer(routing.name, routing=routing) for routing in ROUTINGS if routing.num_experts <= 12),
    Layer("as GPT-OSS", routing=ROUTINGS[1], bias=True),
    Layer(
        "as Llama-4",
        routing=Routing("sigmoid", routing="sigmoid", num_experts_per_tok=1),
        weight_on_input=True,
        shared_intermediate_size=11,
    ),
    *grid(
        lambda routing, shared_expert_gate, **_: (
            f"{routing.name}, shared experts{', gated' * shared_expert_gate}"
        ),
        of=Layer,
        routing=(ROUTINGS[1], biased("biased")),
        shared_intermediate_size=11,
        shared_expert_gate=(False, True),
    ),
    *table(
        "dtype shared_intermediate_size shared_expert_gate",
        *((dtype, *shared) for dtype in FLOAT_TYPES for shared in ((0, False), (129, True))),
        name=lambda routing, dtype, shared_intermediate_size, shared_expert_gate: (
            f"all experts, shared experts {shared_intermediate_size}{', gated' * shared_expert_gate}, "
            f"{type_name(dtype)}"
        ),
        of=Layer,
        routing=ALL,
    ),
)


def parameter_shapes(config: MoEConfig, hidden_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (config.num_experts, hidden_size),
        "experts.w13": (config.num_experts, 2 * config.intermediate_size, hidden_size),
        "experts.w2": (config.num_experts, hidden_size, config.intermediate_size),
    }
    if config.bias:
        shapes["gate.bias"] = (config.num_experts,)
        shapes["experts.b13"] = shapes["experts.w13"][:2]
        shapes["experts.b2"] = shapes["experts.w2"][:2]
    if config.routing == "biased-grouped":
        shapes["correction_bias"] = (config.num_experts,)
    if size := config.shared_intermediate_size:
        shapes["shared_experts.gate_proj.weight"] = shapes["shared_experts.up_proj.weight"] = (
            size,
            hidden_size,
        )
        shapes["shared_experts.down_proj.weight"] = (hidden_size, size)
        if config.shared_expert_gate:
            shapes["shared_expert_gate.weight"] = (1, hidden_size)
    return shapes


def named_weights(moe: MoE) -> dict[str, torch.Tensor]:
    """The layer's parameters; merged ones as the parts that a checkpoint has."""
    weights: dict[str, torch.Tensor] = dict(moe.named_parameters())
    for prefix, module in moe.named_modules():
        if isinstance(module, MergedLinear):
            for name, _ in module.named_parameters():
                del weights[f"{prefix}.{name}"]
            parent = prefix[: prefix.rfind(".") + 1]
            weights |= {f"{parent}{name}": view for name, view in module.weight_views().items()}
    return weights


def moe_or_refusal(impl: type[MoE], case: Layer) -> MoE | None:
    """The implementation's MoE; None if it refuses biases and clamped SwiGLU."""
    try:
        return make_moe(impl, case.config(), case.hidden_size, case.dtype)
    except ValueError:
        if not case.bias:
            raise
        return None


@contract("Its parameters have the names and shapes that weights are loaded by.", LAYERS)
def parameters(impl: type[MoE], case: Layer) -> None:
    moe = moe_or_refusal(impl, case)
    if moe is None:
        return
    weights = named_weights(moe)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    expect_equal("parameters", found, parameter_shapes(case.config(), case.hidden_size))
    types = {name: weight.dtype for name, weight in weights.items()}
    expect_equal("dtype of correction_bias", types.pop("correction_bias", torch.float32), torch.float32)
    expect_equal("other dtypes", set(types.values()), {case.dtype})


@contract("The layer is its routed experts, plus the shared ones, gated or not.", LAYERS)
def layer(impl: type[MoE], case: Layer) -> None:
    inputs = Inputs(case.seed)
    config = case.config()
    moe = moe_or_refusal(impl, case)
    if moe is None:
        return
    inputs.fill_(moe)
    x = inputs.normal(case.routing.num_tokens, case.hidden_size, dtype=case.dtype)
    w = {name: weight.detach().double() for name, weight in named_weights(moe).items()}
    x64 = x.double()
    topk = route_all64(config, x64 @ w["gate.weight"].T + w.get("gate.bias", 0.0), w.get("correction_bias"))
    topk = TopKOutput(*(each.to(x64.device) for each in topk))  # whose exact order is found on a CPU
    routed_x = x64
    if case.weight_on_input:
        routed_x = x64 * topk.topk_weights
        topk = TopKOutput(torch.ones_like(topk.topk_weights), topk.topk_ids)
    expected = experts64(
        routed_x,
        topk,
        w["experts.w13"],
        w["experts.w2"],
        w.get("experts.b13"),
        w.get("experts.b2"),
        swiglu_limit=config.swiglu_limit,
    ).to(check_device())
    if case.shared_intermediate_size:
        gate_up = [x64 @ w[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up")]
        shared = silu_and_mul64(torch.cat(gate_up, dim=-1)) @ w["shared_experts.down_proj.weight"].T
        if case.shared_expert_gate:
            shared = shared / (1 + torch.exp(-(x64 @ w["shared_expert_gate.weight"].T)))
        expected = expected + shared
    y = run_poisoned(moe, x)
    expect_form("y", y, like=x)
    expect_close("y", y, expected, tolerance("moe", case.dtype))
