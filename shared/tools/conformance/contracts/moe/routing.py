"""Clauses of routing: the experts of each token, and their weights."""

from __future__ import annotations

import math
from typing import Literal

import torch

from diptych.shared.config import MoEConfig
from diptych.shared.interfaces import MoE, TopKOutput
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance


class Routing(Case):
    """A MoEConfig and the number of tokens to route."""

    num_experts = 7
    num_experts_per_tok = 3
    norm_topk_prob = False
    routing: Literal["softmax", "grouped", "biased-grouped", "sigmoid"] = "softmax"
    num_expert_groups = 1
    topk_group = 1
    routed_scaling_factor = 1.0
    num_tokens = 50
    seed = 0

    def check(self) -> None:
        if min(self.num_experts, self.num_expert_groups) < 1:
            raise ValueError("there must be experts, and groups of them")
        self.config()

    def config(self, intermediate_size: int = 24) -> MoEConfig:
        names = MoEConfig.__dataclass_fields__
        fields = {name: value for name, value in self.fields().items() if name in names}
        return MoEConfig(intermediate_size=intermediate_size, **fields)

    def bias(self, inputs: Inputs) -> torch.Tensor | None:
        return inputs.normal(self.num_experts) if self.routing == "biased-grouped" else None


def grouped(name: str, **fields: object) -> Routing:
    values = {"num_experts": 12, "norm_topk_prob": True, "num_expert_groups": 4, "topk_group": 2, **fields}
    return Routing(name, routing="grouped", **values)


def biased(name: str, **fields: object) -> Routing:
    values = {"num_experts": 12, "norm_topk_prob": True, "num_expert_groups": 4, "topk_group": 2, **fields}
    return Routing(name, routing="biased-grouped", **{"routed_scaling_factor": 2.5, **values})


ROUTINGS = (
    Routing("plain"),
    Routing("renormalised", norm_topk_prob=True),
    Routing("all experts", num_experts_per_tok=7),
    Routing("one expert chosen", num_experts_per_tok=1),
    Routing("one expert", num_experts=1, num_experts_per_tok=1, norm_topk_prob=True),
    Routing("scaled", routed_scaling_factor=1.5),
    Routing("sigmoid", routing="sigmoid"),
    Routing("sigmoid, one expert chosen", routing="sigmoid", num_experts_per_tok=1),
    Routing("128 experts, 8 each", num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
    Routing("1 token", num_tokens=1),
    Routing("no tokens", num_tokens=0),
    grouped("grouped"),
    grouped("grouped, not renormalised", norm_topk_prob=False),
    grouped("grouped, as many as there are", num_experts_per_tok=6),
    grouped("groups of one", num_expert_groups=12, topk_group=5),
    grouped("grouped, scaled", routed_scaling_factor=16.0),
    biased("biased"),
    biased("biased, not renormalised", norm_topk_prob=False),
    biased("biased, groups of one", num_expert_groups=12, topk_group=5),
    biased("biased, 256 experts", num_experts=256, num_experts_per_tok=8, num_expert_groups=8, topk_group=4),
    biased("biased, no tokens", num_tokens=0),
)


def make_moe(impl: type[MoE], config: MoEConfig, hidden_size: int, dtype: torch.dtype = torch.float32) -> MoE:
    with building(dtype):
        return impl(config, hidden_size)


def route64(config: MoEConfig, logits: list[float], bias: list[float]) -> list[tuple[int, float]]:
    """One token's (expert, weight), best first, computed in loops as in the contract."""
    experts = range(config.num_experts)
    if config.routing == "sigmoid":
        scores, choice = [1 / (1 + math.exp(-x)) for x in logits], logits
    elif config.routing == "biased-grouped":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
        choice = [scores[e] + bias[e] for e in experts]
    else:
        weights = [math.exp(x - max(logits)) for x in logits]
        scores = choice = [w / sum(weights) for w in weights]
    eligible = list(experts)
    if config.routing in ("grouped", "biased-grouped"):
        size = config.num_experts // config.num_expert_groups
        members = [list(experts)[g * size : (g + 1) * size] for g in range(config.num_expert_groups)]
        num_best = 2 if config.routing == "biased-grouped" else 1
        group_scores = [sum(sorted((choice[e] for e in group), reverse=True)[:num_best]) for group in members]
        best = sorted(range(len(members)), key=lambda g: (-group_scores[g], g))[: config.topk_group]
        eligible = [e for g in best for e in members[g]]
    chosen = sorted(eligible, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
    return [(e, scores[e] / total * config.routed_scaling_factor) for e in chosen]


def route_all64(config: MoEConfig, logits: torch.Tensor, bias: torch.Tensor | None) -> TopKOutput:
    """Route all tokens: float64 weights and int32 ids on the CPU."""
    bias_list = [0.0] * config.num_experts if bias is None else bias.double().tolist()
    routes = [route64(config, row, bias_list) for row in logits.double().tolist()]
    shape = (len(routes), config.num_experts_per_tok)
    weights = torch.tensor([[w for _, w in row] for row in routes], dtype=torch.float64)
    ids = torch.tensor([[e for e, _ in row] for row in routes], dtype=torch.int32)
    return TopKOutput(weights.view(shape), ids.view(shape))


@contract("Experts and weights are those of the definition, best first; logits are not modified.", ROUTINGS)
def routes(impl: type[MoE], case: Routing) -> None:
    inputs = Inputs(case.seed)
    config = case.config()
    logits, bias = inputs.normal(case.num_tokens, case.num_experts, std=2.0), case.bias(inputs)
    before = logits.clone()
    topk = run_poisoned(make_moe(impl, config, 16).topk, logits, bias)
    expected = route_all64(config, logits, bias)
    expect_form("topk_weights", topk.topk_weights, like=expected.topk_weights.to(logits))
    expect_form("topk_ids", topk.topk_ids, like=expected.topk_ids.to(check_device()))
    expect_equal("topk_ids", topk.topk_ids, expected.topk_ids.to(check_device()))
    expect_close(
        "topk_weights", topk.topk_weights, expected.topk_weights, tolerance("softmax", torch.float32)
    )
    expect_equal("logits afterwards", logits, before)


@contract(
    "Logits of a half type are computed in float32.",
    (ROUTINGS[1], grouped("grouped"), biased("biased")),
)
def half_logits(impl: type[MoE], case: Routing) -> None:
    for dtype in HALF_TYPES:
        inputs = Inputs(case.seed)
        config = case.config()
        logits, bias = (
            inputs.normal(case.num_tokens, case.num_experts, std=2.0, dtype=dtype),
            case.bias(inputs),
        )
        topk = run_poisoned(make_moe(impl, config, 16).topk, logits, bias)
        expected = run_poisoned(make_moe(impl, config, 16).topk, logits.float(), bias)
        expect_equal(f"topk_ids, {type_name(dtype)}", topk.topk_ids, expected.topk_ids)
        expect_close(f"topk_weights, {type_name(dtype)}", topk.topk_weights, expected.topk_weights, EXACT)


@contract("Of equal experts the lowest id comes first, of equal groups the lowest too.", EXAMPLE)
def ties(impl: type[MoE], case: Case) -> None:
    device = check_device()
    logits = torch.zeros(3, 7, device=device)
    logits[1, 5] = logits[1, 2] = 1.0
    logits[2, 1:] = 3.0
    ids = run_poisoned(make_moe(impl, ROUTINGS[0].config(), 16).topk, logits).topk_ids
    expect_equal("ids", ids.tolist(), [[0, 1, 2], [2, 5, 0], [1, 2, 3]])
    for routing in (grouped("grouped"), biased("biased")):
        logits = torch.zeros(2, 12, device=device)
        logits[1, 3:] = 1.0
        bias = torch.zeros(12, device=device) if routing.routing == "biased-grouped" else None
        ids = run_poisoned(make_moe(impl, routing.config(), 16).topk, logits, bias).topk_ids
        expect_equal(f"ids, {routing.name}", ids.tolist(), [[0, 1, 2], [3, 4, 5]])


@contract("The correction bias chooses but does not weigh.", EXAMPLE)
def bias_does_not_weigh(impl: type[MoE], case: Case) -> None:
    routing = biased("", num_expert_groups=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0)
    bias = torch.zeros(12, device=check_device())
    bias[[9, 4, 6]] = torch.tensor([30.0, 20.0, 10.0], device=check_device())
    topk = run_poisoned(make_moe(impl, routing.config(), 16).topk, torch.zeros(1, 12).to(bias), bias)
    expect_equal("ids", topk.topk_ids.tolist(), [[9, 4, 6]])
    expect_equal("weights", topk.topk_weights.tolist(), [[0.5, 0.5, 0.5]])


@contract("A group that is out stays out, though all scores plus bias are negative.", EXAMPLE)
def negative_choice(impl: type[MoE], case: Case) -> None:
    inputs = Inputs(0)
    config = biased("", num_experts_per_tok=6).config()
    logits, bias = inputs.normal(20, 12), inputs.normal(12) - 9.0
    ids = run_poisoned(make_moe(impl, config, 16).topk, logits, bias).topk_ids
    expect_equal("ids", ids.cpu(), route_all64(config, logits, bias).topk_ids)


@contract(
    "norm_topk_prob: weights sum to 1 before the scaling factor, however far apart the logits.",
    tuple(routing for routing in ROUTINGS if routing.norm_topk_prob and routing.num_tokens),
)
def renormalised(impl: type[MoE], case: Routing) -> None:
    inputs = Inputs(case.seed)
    config = case.config()
    logits = inputs.normal(case.num_tokens, case.num_experts, std=8.0)
    weights = run_poisoned(make_moe(impl, config, 16).topk, logits, case.bias(inputs)).topk_weights
    total = torch.full((case.num_tokens,), config.routed_scaling_factor, dtype=torch.float64)
    expect_close("sum of weights", weights.double().sum(-1), total, tolerance("softmax", torch.float32))
    expect_true("weights are not negative", bool((weights >= 0).all()), weights.min())
