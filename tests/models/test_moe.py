"""Routing and experts against loops over tokens, in plain Python and float64."""

import math
from dataclasses import replace

import pytest
import torch

from reference.moe import FusedExperts, MoE, TopK
from shared.config import MoEConfig
from shared.interfaces import TopKOutput

PLAIN = MoEConfig(7, 3, 24, norm_topk_prob=False)
GROUPED = MoEConfig(12, 3, 24, True, "grouped", num_expert_groups=4, topk_group=2)
BIASED = replace(GROUPED, routing="biased-grouped", routed_scaling_factor=2.5)
CONFIGS = {
    "plain": PLAIN,
    "renormalised": replace(PLAIN, norm_topk_prob=True),
    "all experts": replace(PLAIN, num_experts_per_tok=7),
    "one expert": replace(PLAIN, num_experts_per_tok=1),
    "scaled": replace(PLAIN, routed_scaling_factor=1.5),
    "grouped": GROUPED,
    "grouped, not renormalised": replace(GROUPED, norm_topk_prob=False),
    "grouped, as many as there are": replace(GROUPED, num_experts_per_tok=6),
    "grouped, groups of one": replace(GROUPED, num_expert_groups=12, topk_group=5),
    "biased": BIASED,
    "biased, not renormalised": replace(BIASED, norm_topk_prob=False),
    "biased, groups of one": replace(BIASED, num_expert_groups=12, topk_group=5),
}


def route(config: MoEConfig, logits: list[float], bias: list[float]) -> list[tuple[int, float]]:
    """One token's (expert, weight), best first, as the contract words it."""
    experts = range(config.num_experts)
    if config.routing == "biased-grouped":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
        choice = [scores[e] + bias[e] for e in experts]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = choice = [math.exp(x) / total for x in logits]
    eligible = list(experts)
    if config.routing != "softmax":
        size = config.num_experts // config.num_expert_groups
        members = [list(experts)[g * size : (g + 1) * size] for g in range(config.num_expert_groups)]
        num_best = 2 if config.routing == "biased-grouped" else 1
        group_scores = [sum(sorted((choice[e] for e in group), reverse=True)[:num_best]) for group in members]
        best = sorted(range(len(members)), key=lambda g: (-group_scores[g], g))[: config.topk_group]
        eligible = [e for g in best for e in members[g]]
    chosen = sorted(eligible, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
    return [(e, scores[e] / total * config.routed_scaling_factor) for e in chosen]


@pytest.mark.parametrize("name", CONFIGS)
def test_topk(name: str) -> None:
    config = CONFIGS[name]
    logits = 2 * torch.randn(50, config.num_experts)
    bias = torch.randn(config.num_experts) if config.routing == "biased-grouped" else None
    topk = TopK(config)(logits, bias)
    bias_list = [0.0] * config.num_experts if bias is None else bias.double().tolist()
    expected = [route(config, row, bias_list) for row in logits.double().tolist()]
    assert topk.topk_ids.tolist() == [[e for e, _ in row] for row in expected]
    weights = torch.tensor([[w for _, w in row] for row in expected])
    # A softmax, a sum and a division in float32.
    torch.testing.assert_close(topk.topk_weights, weights, rtol=2e-6, atol=0.0)
    assert topk.topk_ids.dtype == torch.int32
    assert topk.topk_weights.dtype == torch.float32


def test_of_equal_experts_the_lowest_id_comes_first() -> None:
    logits = torch.zeros(3, 7)
    logits[1, 5] = logits[1, 2] = 1.0
    logits[2] = torch.tensor([0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    assert TopK(PLAIN)(logits).topk_ids.tolist() == [[0, 1, 2], [2, 5, 0], [1, 2, 3]]
    assert TopK(GROUPED)(torch.zeros(1, 12)).topk_ids.tolist() == [[0, 1, 2]]


def test_the_bias_chooses_but_does_not_weigh() -> None:
    config = replace(
        BIASED, num_expert_groups=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0
    )
    bias = torch.zeros(12)
    bias[[9, 4, 6]] = torch.tensor([30.0, 20.0, 10.0])
    topk = TopK(config)(torch.zeros(1, 12), bias)
    assert topk.topk_ids.tolist() == [[9, 4, 6]]
    assert topk.topk_weights.tolist() == [[0.5, 0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_topk_computes_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 7).to(dtype)
    topk, expected = TopK(PLAIN)(logits), TopK(PLAIN)(logits.float())
    assert torch.equal(topk.topk_weights, expected.topk_weights)
    assert torch.equal(topk.topk_ids, expected.topk_ids)


def make_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype
) -> FusedExperts:
    experts = FusedExperts(num_experts, hidden_size, intermediate_size).to(dtype)
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    return experts


def run_experts(experts: FusedExperts, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
    """Token by token, choice by choice, in float64."""
    w13, w2, x = experts.w13.double(), experts.w2.double(), x.double()
    y = torch.zeros_like(x)
    for t, (weights, ids) in enumerate(zip(topk.topk_weights.tolist(), topk.topk_ids.tolist())):
        for weight, e in zip(weights, ids):
            if e >= 0:
                gate, up = (w13[e] @ x[t]).chunk(2)
                y[t] += weight * (w2[e] @ (gate / (1 + torch.exp(-gate)) * up))
    return y


def random_topk(num_tokens: int, k: int, num_experts: int) -> TopKOutput:
    ids = torch.stack([torch.randperm(num_experts)[:k] for _ in range(num_tokens)]).to(torch.int32)
    return TopKOutput(torch.rand(num_tokens, k), ids)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 2e-6),  # sums of up to 33 products of size 1
        (torch.bfloat16, 2e-2),  # the hidden activations and the result are rounded to 2^-9
    ],
)
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1, 5, 2), (13, 5, 3), (40, 9, 1), (3, 64, 8)])
def test_fused_experts(
    dtype: torch.dtype, tolerance: float, num_tokens: int, num_experts: int, k: int
) -> None:
    experts = make_experts(num_experts, 33, 20, dtype)
    x = torch.randn(num_tokens, 33).to(dtype)
    before = x.clone()
    topk = random_topk(num_tokens, k, num_experts)
    y = experts(x, topk)
    torch.testing.assert_close(y.double(), run_experts(experts, x, topk), rtol=tolerance, atol=tolerance)
    assert y.dtype == dtype
    assert torch.equal(x, before)


def test_padding_contributes_nothing() -> None:
    experts = make_experts(5, 16, 8, torch.float32)
    x = torch.randn(4, 16)
    topk = random_topk(4, 2, 5)
    topk.topk_ids[1, 0] = -1
    topk.topk_ids[2] = -1
    topk.topk_weights[topk.topk_ids == -1] = float("nan")  # nobody may look at it
    y = experts(x, topk)
    assert y[2].tolist() == [0.0] * 16
    topk.topk_weights.nan_to_num_(0.0)
    torch.testing.assert_close(y.double(), run_experts(experts, x, topk), rtol=2e-6, atol=2e-6)  # as above


def test_all_tokens_to_one_expert_and_no_tokens_at_all() -> None:
    experts = make_experts(5, 16, 8, torch.float32)
    x = torch.randn(21, 16)
    topk = TopKOutput(torch.ones(21, 1), torch.full((21, 1), 3, dtype=torch.int32))
    torch.testing.assert_close(experts(x, topk).double(), run_experts(experts, x, topk), rtol=2e-6, atol=2e-6)
    nobody = TopKOutput(topk.topk_weights[:0], topk.topk_ids[:0])
    assert experts(x[:0], nobody).shape == (0, 16)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("config", [PLAIN, BIASED], ids=["softmax", "biased-grouped"])
def test_moe_adds_the_shared_experts(config: MoEConfig, gated: bool) -> None:
    config = replace(config, shared_intermediate_size=11, shared_expert_gate=gated)
    moe = MoE(config, 16)
    for parameter in moe.parameters():
        parameter.data.normal_(0.0, 0.3)
    x = torch.randn(10, 16)
    routed = moe.experts(x, moe.topk(moe.gate(x), moe.correction_bias))
    shared = moe.shared_experts(x)
    if gated:
        shared = shared / (1 + torch.exp(-(x @ moe.shared_expert_gate.weight.T)))
    torch.testing.assert_close(
        moe(x), routed + shared, rtol=1e-5, atol=1e-6
    )  # the gate is written differently
    assert not torch.allclose(moe(x), routed, atol=1e-3)
    assert (moe.correction_bias is None) == (config.routing == "softmax")


def test_moe_without_shared_experts() -> None:
    moe = MoE(PLAIN, 16)
    for parameter in moe.parameters():
        parameter.data.normal_(0.0, 0.3)
    x = torch.randn(10, 16)
    assert torch.equal(moe(x), moe.experts(x, moe.topk(moe.gate(x))))
    assert sorted(name for name, _ in moe.named_parameters()) == ["experts.w13", "experts.w2", "gate.weight"]
