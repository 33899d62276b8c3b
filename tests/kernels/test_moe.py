"""The experts' kernels beyond their contract: every plan, uneven routing, sorting; and planted bugs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from diptych.optimized import moe
from diptych.optimized.kernels import gpu_table
from diptych.optimized.kernels.moe import moe_tiles
from diptych.optimized.kernels.moe.local_experts import local_experts
from diptych.optimized.kernels.moe.moe_align import align, max_num_blocks
from diptych.optimized.kernels.moe.moe_tiles import GemvTile, Plan, Shape, Tile
from diptych.shared.interfaces import TopKOutput
from diptych.shared.parallel.expert_map import ExpertPlacement, in_order, map_of
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.moe.expected import experts64
from tests.kernels.fast_grid import fast_grid

HIDDEN, INTER = 160, 96
PLANS = {
    "gemv": Plan(GemvTile(4, 1, 1, 4), GemvTile(2, 2, 1, 3)),
    "blocks of 16": Plan(Tile(16, 32, 64, 1, 4, 2), Tile(16, 64, 32, 2, 4, 2)),
    "blocks of 64, by pointers": Plan(Tile(64, 64, 32, 8, 4, 2, False), Tile(64, 64, 32, 1, 4, 2, False)),
    "blocks of 128, by halves": Plan(Tile(128, 32, 32, 1, 4, 2), Tile(128, 64, 32, 8, 4, 2)),
    "blocks of 64": Plan(Tile(64, 64, 32, 8, 4, 2), Tile(64, 64, 32, 3, 4, 2)),
}


def run_experts(
    topk: TopKOutput, num_experts: int, dtype: torch.dtype, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of random weights and tokens, and what it should be."""
    inputs = Inputs(0)
    with building(dtype):
        experts = moe.FusedExperts(num_experts, HIDDEN, INTER)
    inputs.fill_(experts)
    x = inputs.normal(len(topk.topk_ids), HIDDEN, dtype=dtype)
    monkeypatch.setattr(moe, "plan", lambda *_: plan)
    y = run_poisoned(experts, x, topk)
    return y, experts64(x, topk, experts.w13, experts.w2)


def routing(kind: str, num_tokens: int, num_experts: int, k: int) -> TopKOutput:
    inputs = Inputs(1)
    ids = torch.stack([inputs.permutation(num_experts)[:k] for _ in range(num_tokens)]).to(torch.int32)
    if kind == "skewed":  # the first choice of all tokens is one expert, and half of the experts have none
        ids = ids % (num_experts // 2)
        ids[:, 0] = num_experts - 1
        ids[:, 1:] = torch.arange(k - 1)
    if kind == "padded":
        ids[::3] = -1
        ids[1::3, 0] = -1
    if kind == "all padded":
        ids.fill_(-1)
    return TopKOutput(inputs.uniform(num_tokens, k), ids)


@fast_grid(
    name={name: name for name in PLANS},
    kind={kind: kind for kind in ("random", "skewed", "padded", "all padded")},
)
def test_every_plan_on_every_routing(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens = 5 if name == "gemv" else 70
    topk = routing(kind, num_tokens, 6, 3)
    y, expected = run_experts(topk, 6, torch.float32, PLANS[name], monkeypatch)
    expect_close("y", y, expected, tolerance("moe", torch.float32))


@fast_grid(name={name: name for name in PLANS}, dtype={type_name(dtype): dtype for dtype in FLOAT_TYPES})
def test_every_plan_in_every_type(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    topk = routing("random", 4 if name == "gemv" else 20, 5, 2)
    y, expected = run_experts(topk, 5, dtype, PLANS[name], monkeypatch)
    expect_close("y", y, expected, tolerance("moe", dtype))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "k", "num_experts"), [(1, 1, 1), (7, 3, 5), (1100, 2, 3), (700, 3, 40), (2500, 2, 3)]
)
def test_pairs_in_order_of_their_experts(num_tokens: int, k: int, num_experts: int, block_size: int) -> None:
    """2100 pairs: counted beforehand. 5000: in two parts."""
    inputs = Inputs(0)
    ids = (inputs.integers(num_experts + 1, num_tokens, k) - 1).to(torch.int32)
    blocks = run_poisoned(align, ids, num_experts, block_size)
    pairs, flat = [], ids.flatten().tolist()
    experts = []
    for expert in range(num_experts):
        own = [pair for pair, e in enumerate(flat) if e == expert]
        num_blocks = -(-len(own) // block_size)
        pairs += own + [len(flat)] * (num_blocks * block_size - len(own))
        experts += [expert] * num_blocks
    expect_equal("num_blocks", blocks.num_blocks.tolist(), [len(experts)])
    assert len(experts) <= max_num_blocks(len(flat), num_experts, block_size) == blocks.experts.numel()
    expect_equal("experts", blocks.experts[: len(experts)].tolist(), experts)
    expect_equal("pairs", blocks.pairs[: len(pairs)].tolist(), pairs)


def test_as_many_blocks_as_routing_may_need() -> None:
    """One pair in every expert but one, which has the rest."""
    ids = torch.zeros(40, 1, dtype=torch.int32, device=check_device())
    ids[:4, 0] = torch.arange(1, 5)
    blocks = run_poisoned(align, ids, 5, 16)
    assert blocks.num_blocks.item() == 3 + 4 <= blocks.experts.numel()


def test_the_same_twice() -> None:
    """Sums are in a fixed order: equal bits."""
    topk = routing("random", 33, 6, 3)
    inputs = Inputs(0)
    with building(torch.float32):
        experts = moe.FusedExperts(6, HIDDEN, INTER)
    inputs.fill_(experts)
    x = inputs.normal(33, HIDDEN)
    expect_equal("y", run_poisoned(experts, x, topk), run_poisoned(experts, x, topk))


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
@pytest.mark.parametrize("num_redundant", [0, 3])
def test_the_experts_of_a_rank(num_tokens: int, num_redundant: int) -> None:
    """Several CTAs, padding, and a map after it has changed: as `choose`, which counts too."""
    num_logical, num_local, device = 13, 4, check_device()
    maps = [in_order(2, num_logical, num_logical + num_redundant)]
    order = maps[0].physical_to_logical.flip(1)
    maps.append(map_of(order, num_logical))
    placement, expected = (ExpertPlacement(maps[0], 1, device) for _ in range(2))
    ids = Inputs(2).integers(num_logical + 1, num_tokens, 3, dtype=torch.int32) - 1
    for experts in maps:
        placement.use(experts)
        expected.use(experts)
        chosen = expected.choose(ids)
        found = [local_experts(ids, placement, first, num_local) for first in (0, 4, 8, 12)]
        for first, local in zip((0, 4, 8, 12), found):
            is_here = (chosen >= first) & (chosen < first + num_local)
            expect_equal(f"experts from {first}", local, torch.where(is_here, chosen - first, -1))
        expect_equal("load", placement.load, 4 * expected.load)


def test_float64_is_refused() -> None:
    experts = moe.FusedExperts(2, 8, 8)
    with pytest.raises(ValueError, match="float64"):
        experts(torch.zeros(1, 8, dtype=torch.float64), TopKOutput(torch.ones(1, 1), torch.zeros(1, 1).int()))


def test_a_measured_plan_serves_up_to_its_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(128, 8, 2048, 768)
    few, many = PLANS["gemv"], PLANS["blocks of 64"]
    monkeypatch.setattr(moe_tiles, "_measured", lambda _: {shape.name(): {4: few, 64: many}})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    cuda = torch.device("cuda")
    chosen = [
        moe_tiles.plan.__wrapped__(shape, num_tokens, torch.bfloat16, cuda)
        for num_tokens in (1, 4, 5, 64, 99)
    ]
    assert chosen == [few, few, many, many, many]
    other = Shape(8, 2, 4096, 14336)
    default = moe_tiles.default_plan(other, 4, torch.bfloat16)
    assert moe_tiles.plan.__wrapped__(other, 4, torch.bfloat16, cuda) == default


def test_tables_of_measured_plans_can_be_read() -> None:
    paths = sorted(gpu_table.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        for plans in moe_tiles._measured(path.stem).values():
            for plan in plans.values():
                assert type(plan.up) is type(plan.down)
                if isinstance(plan.up, Tile):
                    assert plan.up.block_m == plan.down.block_m


def measured_plans() -> list[Any]:
    """Plans of every GPU's table: a shape, a number of tokens, and the plan up to there."""
    return [
        pytest.param(Shape(*map(int, re.findall(r"\d+", name))), num_tokens, plan, id=f"{name}: {num_tokens}")
        for path in sorted(gpu_table.FOLDER.glob("*.json"))
        for name, plans in moe_tiles._measured(path.stem).items()
        for num_tokens, plan in plans.items()
    ]


def expect_right(shape: Shape, num_tokens: int) -> None:
    """Check some tokens: the others make the blocks full."""
    inputs = Inputs(0)
    with building(torch.bfloat16):
        experts = moe.FusedExperts(shape.num_experts, shape.hidden_size, shape.intermediate_size)
    generator = torch.Generator(check_device()).manual_seed(0)  # a billion numbers, drawn where they are used
    for parameter in experts.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    x = inputs.normal(num_tokens, shape.hidden_size, dtype=torch.bfloat16)
    weights, ids = routing("random", num_tokens, shape.num_experts, shape.top_k)
    y = run_poisoned(experts, x, TopKOutput(weights, ids))
    some = slice(None, None, -(-num_tokens // 12))
    expected = experts64(x[some], TopKOutput(weights[some], ids[some]), experts.w13, experts.w2)
    expect_close("y", y[some], expected, tolerance("moe", torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "num_tokens", "_"), measured_plans())
def test_plans_of_this_gpu_compute_what_they_should(shape: Shape, num_tokens: int, _: Plan) -> None:
    expect_right(shape, num_tokens)


@pytest.mark.full
@pytest.mark.parametrize(("_", "num_tokens", "plan"), measured_plans())
def test_measured_plans_compute_what_they_should(
    _: Shape, num_tokens: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fewer and smaller experts."""
    monkeypatch.setattr(moe, "plan", lambda *_: plan)
    size = (1024, 512) if isinstance(plan.up, GemvTile) else (512, 256)
    expect_right(Shape(6, 2, *size), min(num_tokens, 70))
