"""Replicas of several ranks that share experts: the answers of one rank, and what each rank has."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from diptych.optimized.graphs.cuda_graph import CudaGraphs
from diptych.optimized.parallel import dp_attention
from diptych.optimized.parallel.dp_attention import PassDispatch as PaddedDispatch
from diptych.reference.parallel.dp_attention import PassDispatch, pads_to_longest
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.processes.replicas_in_step import in_step
from diptych.shared.interfaces import Collectives
from diptych.shared.interfaces.collectives import Grid
from diptych.shared.loading import load_model
from diptych.shared.parallel.grid import groups_of
from diptych.shared.parallel.in_step import DispatchInStep
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import Req
from tests.model_runner.fake_graphs import FakeGraphs
from tests.parallel import test_quantized_ranks as quantized
from tests.parallel.test_dp_attention import MIXES, PANELS
from tests.parallel.test_drafts_in_step import DRAFTS, EAGLE3, Seen
from tests.parallel.test_families import FAMILIES
from tests.parallel.tiny_ranks import answers_of_one, make_config, of_replicas
from tests.planted import Bug, Bugs

QWEN, DEEPSEEK = "qwen3-moe", "deepseek-v3"
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (QWEN, flags) for name, flags in MIXES.items()},
    **{name: (QWEN, flags) for name, flags in DRAFTS.items() if flags["speculative"] == "ngram"},
    "EAGLE-3": (QWEN, DRAFTS["EAGLE-3"]),
    "shared experts": (DEEPSEEK, {"ep": 2}),
    "shared experts, mixed chunks": (DEEPSEEK, MIXES["mixed chunks"]),
    "shared experts, n-gram chains": (DEEPSEEK, DRAFTS["n-gram chains"] | {"ep": 4}),
}
FAST = {
    ("reference", "whole"),
    ("reference", "n-gram trees"),
    ("optimized", "mixed chunks"),
    ("optimized", "small pool"),
    ("optimized", "shared experts, n-gram chains"),
}


@pytest.fixture(scope="module")
def models(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {QWEN: folders[QWEN]}
    for name, config in ((DEEPSEEK, FAMILIES[DEEPSEEK]), ("EAGLE-3", EAGLE3)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return found


@pytest.mark.parametrize(
    ("panel", "form"),
    [
        pytest.param(panel, form, marks=[] if (panel, form) in FAST else pytest.mark.full)
        for panel in PANELS
        for form in FORMS
    ],
)
def test_replicas_of_two_ranks_answer_as_one(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, panel: str, form: str
) -> None:
    model, flags = FORMS[form][0], {"ep": 1} | FORMS[form][1]
    ep, seen = flags.pop("ep"), Seen(monkeypatch, 4)
    if form == "EAGLE-3":
        flags["speculative_draft_model"] = models[form]
    assert not differ_from_one_rank(models[model], ep, **flags, **PANELS[panel])
    assert seen.of_ranks[::2] == seen.of_ranks[1::2]  # the ranks of a replica, IDLE ones too
    assert any("verify" in mix for mix in seen.mixes()) == ("speculative" in flags)


def differ_from_one_rank(model: str, ep: int = 2, only: tuple[str, ...] = (), **flags: Any) -> bool:
    """Two replicas of two ranks. Ranks of a replica have the same answers."""
    alone = {name: value for name, value in flags.items() if not name.startswith("speculative")}
    expected = {req.rid: req.output_ids for req in answers_of_one(make_config(model, **alone))}
    found, replicas = of_replicas(make_config(model, tp=2, **flags), 2, ep=ep, only=only)
    assert len(found) == 2 * len(only or expected)
    num_passes = {replica.runner.num_passes for replica in replicas}
    assert len(num_passes) == 1
    assert all(req.output_ids == other.output_ids for req, other in zip(found[::2], found[1::2]))
    return any(req.output_ids != expected[req.rid] for req in found)


@pytest.mark.parametrize("panel", PANELS)
def test_a_replica_without_requests(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, panel: str
) -> None:
    """Both of its ranks run IDLE batches."""
    seen = Seen(monkeypatch, 4)
    assert not differ_from_one_rank(models[QWEN], only=("r0",), **PANELS[panel])
    assert {frozenset({kind, "idle"}) for kind in ("prefill", "decode")} <= seen.mixes()
    assert seen.of_ranks[::2] == seen.of_ranks[1::2]


def test_graphs_end_before_any_group_whose_collectives_they_contain() -> None:
    class Group:
        size, grid = 2, None

    class Graph:
        num_resets = 0

        def reset(self) -> None:
            self.num_resets += 1

    graphs: Any = CudaGraphs.__new__(CudaGraphs)
    graphs._graphs = [Graph()]
    ranks: Any = Group()
    ranks.grid = Grid(Group(), Group())  # type: ignore[arg-type]
    graphs.capture_with(ranks)
    assert graphs.ranks is ranks
    for num_ended in (1, 2):
        ranks.grid = ranks.grid[1:]
        assert graphs._graphs[0].num_resets == num_ended


@pytest.mark.full
def test_all_ranks_replay_steps_of_one_size(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole panel in Triton's interpreter, with graphs: an IDLE replica replays the step of the other
    one, with the sums of its own ranks."""
    captured: list[int] = []

    def graphs(model: Any, device: torch.device, ranks: Collectives) -> FakeGraphs:
        captured.append(len(groups_of(ranks)))
        return FakeGraphs(device, ranks)

    monkeypatch.setattr(dp_attention, "graphs_of_runner", graphs)
    flags: dict[str, Any] = {"cuda_graph_bs": [1, 2], "max_running_requests": 2}
    expected = {req.rid: req.output_ids for req in answers_of_one(make_config(models[QWEN], **flags))}
    config = make_config(models[QWEN], panel="optimized", tp=2, **flags)
    reqs, replicas = of_replicas(config, 2, ep=2, in_turn=True, only=("r0",))
    assert [req.output_ids for req in reqs] == [expected["r0"]] * 2
    assert captured == [3] * 4
    ((num_passes, num_replays),) = {(each.runner.num_passes, each.runner.replays.steps) for each in replicas}
    assert 0 < num_replays < num_passes


def test_a_rank_of_a_replica_has_its_part_of_both(models: dict[str, str]) -> None:
    whole = make_config(models[QWEN])
    config = whole.updated(dp=2, tp=2, dp_attention=True)
    name, expert = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.experts.w2"
    weights = assemble(whole).model.state_dict()

    def parts(ranks: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        state = assemble(config, tp=ranks).model.state_dict()
        return state[name], state[expert]

    found = on_ranks(4, parts, config=config)
    for replica in (found[:2], found[2:]):
        assert torch.equal(torch.cat([attention for attention, _ in replica], dim=1), weights[name])
    assert torch.equal(torch.cat([experts for _, experts in found], dim=2), weights[expert])


QUANTIZED = Bugs(
    "scales of all replicas", "diptych.shared.loading.load_model.quantize_linears", "differences"
)
QUANTIZE = load_model.quantize_linears


def _scaled_in_the_replica(*args: Any) -> None:
    """A rank scales its part of an expert's input by the largest value of its replica's parts."""
    QUANTIZE(*args[:5])


QUANTIZED.add_all(_scaled_in_the_replica)


@QUANTIZED.found_by(honest=True)
def test_the_input_of_an_expert_is_scaled_by_all_ranks_that_have_parts_of_it(
    bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    config = quantized.config_of(tmp_path, QWEN, quantization="fp8")
    alone = quantized.answers(assemble(config))
    bug.plant_in(monkeypatch)
    both = config.updated(dp=2, tp=2, dp_attention=True)

    def run(ranks: Collectives) -> list[Req]:
        assembly = assemble(both, clock=lambda: 0.0, tp=ranks)
        return quantized.answers(in_step(assembly, ranks))

    found = on_ranks(4, run, config=both)
    return median(quantized.differences(found[0], alone)) > quantized.MEDIAN["fp8"]


def _own_sum(self: PassDispatch, summands: torch.Tensor) -> torch.Tensor:
    """The outputs of the other replicas' experts are left out."""
    start = max(self._tokens.num_tokens) * self.ranks.rank if pads_to_longest(self._tokens) else self._start
    return summands[start : start + self._end - self._start]


def _own_rows(self: PaddedDispatch, summands: torch.Tensor, num_own: int) -> torch.Tensor:
    """In the optimized panel the outputs of the other replicas' experts are left out."""
    start = self.ranks.rank * num_own if self.is_padded else sum(self._nums[: self.ranks.rank])
    return summands[start : start + num_own]


def _part_in_the_replica(self: DispatchInStep, ranks: Collectives, ep: int) -> None:
    """The number of a rank's experts is counted in its replica."""
    BEGIN(self, ranks, ep)
    self.part = groups_of(ranks)[1].rank * ep // groups_of(ranks)[1].size


def _of_all_ranks(self: DispatchInStep, ranks: Collectives, ep: int) -> None:
    """Tokens go among all ranks, so the ranks of a replica add each token's outputs again."""
    BEGIN(self, ranks, ep)
    self.ranks = ranks


BEGIN = DispatchInStep.__init__
OF_REPLICAS = Bugs("replicas of several ranks", finder="answers of one rank")
for _panel, _wrong, _where in (
    ("reference", _own_sum, f"{PassDispatch.__module__}.PassDispatch._scatter"),
    ("optimized", _own_rows, f"{PaddedDispatch.__module__}.PassDispatch._scatter"),
    *((each, _part_in_the_replica, f"{BEGIN.__module__}.{BEGIN.__qualname__}") for each in PANELS),
    *((each, _of_all_ranks, f"{BEGIN.__module__}.{BEGIN.__qualname__}") for each in PANELS),
):
    OF_REPLICAS.add(f"{_panel}: {_wrong.__name__.strip('_')}", _wrong, where=_where)


@OF_REPLICAS.found_by()
def test_what_ranks_of_a_replica_add(
    bug: Bug, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    bug.plant_in(monkeypatch)
    return differ_from_one_rank(models[QWEN], **PANELS[bug.name.partition(":")[0]])
