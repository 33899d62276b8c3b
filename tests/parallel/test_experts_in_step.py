"""Replicas that share experts which move: the answers of one rank, and loads that count tokens only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.parallel.dp_attention import PassDispatch
from diptych.shared.engine.processes.child import EngineProcessEnded
from diptych.shared.engine.processes.replicas_in_step import ScheduleInStep
from diptych.shared.interfaces import MoE, TopKOutput
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.expert_map import ExpertPlacement, in_order
from diptych.shared.parallel.in_step import DispatchInStep, ExpertsInStep, PassTokens
from diptych.shared.parallel.meeting import num_computers
from tests.parallel.strict_ranks import StrictRanks
from tests.parallel.test_dp_attention import PANELS
from tests.parallel.test_drafts_in_step import CHAINS, Seen
from tests.parallel.tiny_ranks import answers_of_one, make_config, of_replicas
from tests.planted import Bug, Bugs

MOVE: dict[str, Any] = {"ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 2}
FORMS: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 8},
    "mixed chunks": {"chunked_prefill_size": 8, "enable_mixed_chunk": True},
    "drafts": CHAINS,
    "two ranks": {"tp": 2},
    "two ranks, four parts": {"tp": 2, "ep": 4},
}
FAST = {("reference", "two ranks"), ("optimized", "mixed chunks"), ("optimized", "two ranks, four parts")}


def experts_of(replica: ScheduleInStep) -> ExpertManager:
    (dispatch,) = {
        module.expert_parallel.dispatch
        for module in replica.runner.model.modules()
        if isinstance(module, MoE)
    }
    assert isinstance(dispatch.experts, ExpertManager)
    return dispatch.experts


def expected_of(model: str) -> dict[str, list[int]]:
    return {req.rid: req.output_ids for req in answers_of_one(make_config(model))}


@pytest.mark.parametrize(
    ("local_size", "others", "num_physical", "num_nodes"),
    [(2, 2, 8, 2), (4, 1, 8, 1), (3, 1, 8, 1), (2, 2, 16, 2), (2, 2, 20, 1), (2, 4, 8, 1)],
)
def test_groups_stay_on_the_computers_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, local_size: int, others: int, num_physical: int, num_nodes: int
) -> None:
    """20 places of 8 experts are more than one on each rank of a computer; with ranks lost, there is one.
    others: what the three other ranks tell."""
    launched = {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "MASTER_ADDR": "",
        "MASTER_PORT": 1,
        "LOCAL_WORLD_SIZE": local_size,
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    experts = in_order(1, 8, num_physical)
    seen: list[tuple[int, ...]] = []

    def balance(load: torch.Tensor, *numbers: int) -> Any:
        seen.append(numbers)
        return experts

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        return x + 3 * torch.tensor([others, others**2]) if len(x) == 2 else x

    config = SimpleNamespace(moe=SimpleNamespace(num_expert_groups=4))
    parts: dict[str, Any] = {
        "model": SimpleNamespace(modules=list, parameters=lambda: iter(torch.zeros(1)), config=config),
        "ranks": SimpleNamespace(size=4, rank=0, all_reduce=all_reduce),
        "balancer": SimpleNamespace(balance=balance),
    }
    manager = ExpertManager(
        **parts, dispatch=None, ep=4, experts=experts, interval=None, reload=len, num_nodes=num_computers(4)
    )  # type: ignore[arg-type]
    manager.placements = [ExpertPlacement(experts, 0, torch.device("cpu"))]
    manager.rebalance()
    manager.keep([0, 1], is_known=True)
    assert seen == [(num_physical, 4, 4, num_nodes), (num_physical // 2, 2, 4, 1)]


@pytest.mark.parametrize(
    ("panel", "form"),
    [
        pytest.param(panel, form, marks=[] if (panel, form) in FAST else pytest.mark.full)
        for panel in PANELS
        for form in FORMS
    ],
)
def test_answers_stay_while_experts_move(folders: dict[str, str], panel: str, form: str) -> None:
    flags = FORMS[form] | PANELS[panel]
    ep, expected = flags.pop("ep", 2), expected_of(folders["qwen3-moe"])
    reqs, replicas = of_replicas(make_config(folders["qwen3-moe"], **flags), 2, ep=ep, **MOVE)
    assert {req.rid for req in reqs} == set(expected)
    assert all(req.output_ids == expected[req.rid] for req in reqs)
    managers = [experts_of(replica) for replica in replicas]
    assert all(each.num_moved > 0 for each in managers)
    for each in managers[1:]:
        assert torch.equal(each.experts.physical_to_logical, managers[0].experts.physical_to_logical)


def loads_differ(model: str, monkeypatch: pytest.MonkeyPatch, panel: str) -> bool:
    """Without rebalancing: whether a rank has counted other tokens than its own."""
    seen = Seen(monkeypatch, 2)
    config = make_config(model, **PANELS[panel], cuda_graph_bs=[1, 4], max_running_requests=4)
    _, replicas = of_replicas(config, 2, ep=2, ep_num_redundant_experts=2)
    assert any("idle" in mix for mix in seen.mixes())
    own = [sum(num_tokens for num_tokens, _, _ in passes) for passes in seen.of_ranks]
    counted = [[int(each.load.sum()) for each in experts_of(replica).placements] for replica in replicas]
    return counted != [[2 * num_tokens] * 2 for num_tokens in own]  # two experts a token, in two layers


@pytest.mark.parametrize("panel", PANELS)
def test_padding_is_no_load(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, panel: str) -> None:
    assert not loads_differ(folders["qwen3-moe"], monkeypatch, panel)


def places_of_one_token(num_ranks: int) -> list[int]:
    """Which of three places, two of them of expert 0, ranks with one token each choose for it."""
    found: list[int] = []

    def keep(x: torch.Tensor, topk: TopKOutput, experts: Any) -> torch.Tensor:
        found.append(int(topk.topk_ids))
        return x

    for rank in range(num_ranks):
        dispatch: Any = SimpleNamespace(ranks=SimpleNamespace(rank=rank), run=keep)
        dispatch.without_padding = lambda ids: ids
        experts: Any = ExpertsInStep(dispatch, ExpertPlacement(in_order(1, 2, 3), 0, torch.device("cpu")))
        experts.run(torch.zeros(1, 4), TopKOutput(torch.ones(1, 1), torch.zeros(1, 1).int()), None)
    return found


def test_ranks_with_one_token_use_all_places_of_an_expert() -> None:
    assert places_of_one_token(3) == [0, 2, 0]


def _first_place(self: ExpertPlacement, topk_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Every rank begins with the first place of an expert."""
    return CHOOSE(self, topk_ids)


def _own_passes_only(self: DispatchInStep, num_tokens: int, *args: Any) -> PassTokens:
    """A rank moves experts before passes of its own batches."""
    manager, self.experts = self.experts, None
    if manager is not None and num_tokens > 0:
        manager.before_pass()
    tokens = BEGIN(self, num_tokens, *args)
    self.experts = manager
    return tokens


def _with_padding(self: PassDispatch, topk_ids: torch.Tensor) -> torch.Tensor:
    """Padding rows count as load."""
    return topk_ids


def _logical_ids(self: ExpertsInStep, x: torch.Tensor, topk: Any, experts: Any) -> torch.Tensor:
    """Tokens go to the places that experts had at the start."""
    return self.dispatch.run(x, topk, experts)


BEGIN = DispatchInStep.begin
CHOOSE = ExpertPlacement.choose
BUGS = Bugs("experts that move, in step", finder="answers or loads")
for _wrong, _where in (
    (_own_passes_only, f"{DispatchInStep.__module__}.DispatchInStep.begin"),
    (_with_padding, f"{PassDispatch.__module__}.PassDispatch.without_padding"),
    (_logical_ids, f"{DispatchInStep.__module__}.ExpertsInStep.run"),
    (_first_place, f"{ExpertPlacement.__module__}.ExpertPlacement.choose"),
):
    BUGS.add(_wrong.__name__.strip("_"), _wrong, where=_where)


@BUGS.found_by(honest=True)
def test_a_planted_bug_changes_answers_or_loads(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool | dict[str, str]:
    expected = expected_of(folders["qwen3-moe"])
    bug.plant_in(monkeypatch)
    if bug.name == "with_padding":
        return loads_differ(folders["qwen3-moe"], monkeypatch, "optimized")
    if bug.name == "first_place":
        return len(set(places_of_one_token(2))) == 1
    try:
        config = make_config(folders["qwen3-moe"])
        reqs, _ = of_replicas(config, 2, seconds=3.0, impl=StrictRanks, ep=2, **MOVE)
    except (AssertionError, RuntimeError, ValueError, EngineProcessEnded) as error:
        return {"answers or loads": str(error)}
    return any(req.output_ids != expected[req.rid] for req in reqs)
