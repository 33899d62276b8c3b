"""Drafts of replicas that share experts: ranks that verify beside ranks that prefill, decode or are idle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.optimized.parallel import dp_attention
from diptych.optimized.parallel.dp_attention import PassDispatch
from diptych.reference.parallel.dp_attention import PassDispatch as PassDispatchOfReference
from diptych.shared.config import EngineConfig
from diptych.shared.engine.processes.child import EngineProcessEnded
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.in_step import DispatchInStep, PassTokens
from tests.model_runner.fake_graphs import FakeGraphs
from tests.parallel.strict_ranks import StrictRanks
from tests.parallel.test_dp_attention import PANELS, in_threads, run_all
from tests.parallel.tiny_ranks import EAGLE, answers_of_one, make_config, of_replicas, requests
from tests.planted import Bug, Bugs

CHAINS = {"speculative": "ngram", "speculative_topk": 1, "speculative_num_draft_tokens": 4}
DRAFTS: dict[str, dict[str, Any]] = {
    "n-gram chains": CHAINS,
    "n-gram trees": {"speculative": "ngram", "ep": 2},
    "shapes that adapt": {"speculative": "standalone", "speculative_auto": True, "ep": 2},
    "EAGLE-3": {"speculative": "eagle3", "speculative_num_steps": 2, "speculative_topk": 1},
    "chunks, a small pool": CHAINS | {"chunked_prefill_size": 8, "max_total_tokens": 64},
}
SIZES = [1, 2, 4]
THREE = CHAINS | {"speculative_num_draft_tokens": 3}  # no size of decode and verify steps is the same
EAGLE3 = EAGLE | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 131,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def config_of(folders: dict[str, str], **flags: Any) -> EngineConfig:
    return make_config(folders["qwen3-moe"], cuda_graph_bs=SIZES, max_running_requests=4, **flags)


def expected_of(folders: dict[str, str]) -> dict[str, list[int]]:
    """Without drafts."""
    return {req.rid: req.output_ids for req in answers_of_one(config_of(folders))}


class Seen:
    """What each rank gives to each pass: its number of tokens, whether it prefills, nodes of a request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.of_ranks: list[list[tuple[int, bool, int]]] = [[] for _ in range(size)]
        begin = DispatchInStep.begin

        def watched(
            dispatch: DispatchInStep,
            num_tokens: int,
            is_extend: bool,
            device: Any,
            num_nodes: int,
            *cut: bool,
        ) -> PassTokens:
            self.of_ranks[dispatch.all_ranks.rank].append((num_tokens, is_extend, num_nodes))
            return begin(dispatch, num_tokens, is_extend, device, num_nodes, *cut)

        monkeypatch.setattr(DispatchInStep, "begin", watched)

    def mixes(self) -> set[frozenset[str]]:
        """What the ranks of each pass do."""
        assert len({len(passes) for passes in self.of_ranks}) == 1
        return {frozenset(map(self._kind, each)) for each in zip(*self.of_ranks)}

    @staticmethod
    def _kind(own: tuple[int, bool, int]) -> str:
        num_tokens, is_extend, num_nodes = own
        if num_tokens == 0:
            return "idle"
        return "prefill" if is_extend else "decode" if num_nodes == 1 else "verify"


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("panel", PANELS)
def test_drafts_change_no_answer(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, panel: str, name: str
) -> None:
    """Greedy ones and seeds; a rank with requests while the other one is idle."""
    flags = DRAFTS[name] | PANELS[panel]
    ep = flags.pop("ep", 1)
    if flags["speculative"] == "standalone":
        flags["speculative_draft_model"] = folders["llama"]
    elif flags["speculative"] == "eagle3":
        (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
        flags["speculative_draft_model"] = str(tmp_path)
    expected = expected_of(folders)
    seen = Seen(monkeypatch, 2)
    controller = in_threads(config_of(folders, **flags).updated(dp=2, ep=ep, dp_attention=True), 2)
    assert run_all(controller, requests()) == expected
    assert run_all(controller, requests()[:1]) == {"r0": expected["r0"]}
    assert {frozenset({"verify"}), frozenset({"verify", "idle"})} <= seen.mixes()
    if name == "n-gram chains":
        assert frozenset({"verify", "decode"}) in seen.mixes()
        assert controller.stats().speculation.num_accepted_tokens > 10


@pytest.mark.parametrize("panel", PANELS)
def test_an_idle_rank_beside_one_that_prefills_and_one_that_verifies(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, panel: str
) -> None:
    seen = Seen(monkeypatch, 3)
    config = config_of(folders, chunked_prefill_size=8, **CHAINS, **PANELS[panel])
    reqs, _ = of_replicas(config, 3, ep=3, only=("r0", "r4"))
    expected = expected_of(folders)
    assert {req.rid: req.output_ids for req in reqs} == {rid: expected[rid] for rid in ("r0", "r4")}
    assert frozenset({"idle", "prefill", "verify"}) in seen.mixes()


@pytest.mark.full
def test_replicas_replay_verify_steps_of_one_size(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole panel in Triton's interpreter, with graphs: all ranks replay in each padded pass, one that
    verifies or decodes beside one that is idle."""
    monkeypatch.setattr(
        dp_attention, "graphs_of_runner", lambda model, device, ranks: FakeGraphs(device, ranks)
    )
    expected, seen = expected_of(folders), Seen(monkeypatch, 2)
    config = config_of(folders, **CHAINS).updated(panel="optimized", cuda_graph_bs=[1, 2])
    reqs, replicas = of_replicas(config, 2, ep=2, in_turn=True, only=("r0", "r2"))
    assert {req.rid: req.output_ids for req in reqs} == {rid: expected[rid] for rid in ("r0", "r2")}
    counts = {(each.runner.num_passes, each.runner.replays.steps) for each in replicas}
    assert len(counts) == 1
    ((num_passes, num_replays),) = counts
    assert 0 < num_replays < num_passes
    assert all(steps.num_replays > 0 for steps in replicas[0].runner.steps.verify)
    assert {frozenset({kind, "idle"}) for kind in ("verify", "decode")} <= seen.mixes()


def test_which_rows_hold_decode_and_verify_steps() -> None:
    dispatch = PassDispatch(ALONE, 1)
    dispatch.captured = {1: {1, 2, 4, 8}, 4: {4, 8, 16}}
    for num_nodes, most, rows in (
        ((1,), 3, 4),
        ((4,), 9, 16),
        ((1, 4), 3, 4),
        ((1, 4), 8, 8),
        ((1, 4), 9, None),  # a decode step of 16 is not captured
        ((1, 3), 1, None),
        ((), 0, 1),
    ):
        assert dispatch._smallest_of_all(PassTokens((most, 0), False, num_nodes)) == rows


BEGIN = PassDispatch.begin
STEP = "diptych.shared.engine.processes.replicas_in_step.ScheduleInStep.step"
OPTIMIZED = "diptych.optimized.parallel.dp_attention.PassDispatch"
REFERENCE = "diptych.reference.parallel.dp_attention.PassDispatch"


def _by_own_nodes(
    self: Any, num_tokens: int, is_extend: bool, device: Any, num_nodes: int, *cut: bool
) -> PassTokens:
    """A rank chooses the size from what its own requests have."""
    tokens = BEGIN(self, num_tokens, is_extend, device, num_nodes, *cut)
    if not tokens.is_extend and num_tokens > 0:
        self.num_rows = self._smallest_of_all(PassTokens(tokens.num_tokens, False, (num_nodes,)))
    return tokens


def _idle_decodes(
    self: Any, num_tokens: int, is_extend: bool, device: Any, num_nodes: int, *cut: bool
) -> PassTokens:
    """An IDLE rank always takes part in the smallest decode step."""
    tokens = BEGIN(self, num_tokens, is_extend, device, num_nodes, *cut)
    if self.is_padded and num_tokens == 0:
        self.num_rows = 1
    return tokens


def _lost_in_verify(self: Any, x: torch.Tensor, topk: Any, experts: Any) -> torch.Tensor:
    """An IDLE rank stays away from passes that verify."""
    if len(x) == 0 and max(self.tokens.num_nodes) > 1:
        return x
    return RUN(self, x, topk, experts)


def _rows_of_a_neighbour(self: Any, summands: torch.Tensor, num_own: int) -> torch.Tensor:
    """In a padded pass a rank takes the rows of another one."""
    return SCATTER(self, summands.roll(num_own, 0) if self.is_padded else summands, num_own)


def _starts_by_own_number(self: Any) -> int:
    """A rank's rows begin where they would if all ranks had as many."""
    return int(self.ranks.rank * self._tokens.num_tokens[self.ranks.rank])


RUN, SCATTER = PassDispatchOfReference.run, PassDispatch._scatter
PLANTED = Bugs("drafts in step", finder="answers of one rank")
for _name, (_where, _wrong) in {
    "the own nodes decide": (f"{OPTIMIZED}.begin", _by_own_nodes),
    "IDLE decodes": (f"{OPTIMIZED}.begin", _idle_decodes),
    "lost IDLE": (f"{REFERENCE}.run", _lost_in_verify),
    "rows of a neighbour": (f"{OPTIMIZED}._scatter", _rows_of_a_neighbour),
    "rows by the own number": (f"{REFERENCE}._start", property(_starts_by_own_number)),
}.items():
    PLANTED.add(_name, _wrong, where=_where)


@PLANTED.found_by(honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    expected = expected_of(folders)
    bug.plant_in(monkeypatch)
    seen, panels = Seen(monkeypatch, 2), PANELS
    if bug.where:
        panels = {"its": PANELS["reference" if ".reference." in bug.where else "optimized"]}
    for flags in panels.values():
        config = config_of(folders, **THREE, **flags).updated(check_invariants=False)
        try:
            reqs, _ = of_replicas(config, 2, seconds=3.0, impl=StrictRanks)
        except (AssertionError, RuntimeError, ValueError, EngineProcessEnded) as error:
            return {"answers of one rank": str(error)}
        if {req.rid: req.output_ids for req in reqs} != expected:
            return True
    assert frozenset({"verify", "decode"}) in seen.mixes()
    return False
