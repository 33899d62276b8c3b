"""Decode steps of replicas that share experts, padded to one size: graphs, padding rows, planted bugs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.graphs import decode_graph
from diptych.optimized.kernels.moe.gathered_experts import gathered_experts
from diptych.optimized.parallel import dp_attention
from diptych.optimized.parallel.dp_attention import PassDispatch, find_by_torch
from diptych.shared.engine.processes.child import EngineProcessEnded
from diptych.shared.engine.processes.replicas_in_step import ScheduleInStep
from diptych.shared.interfaces import FusedExperts, TopKOutput
from diptych.shared.parallel.in_step import PassTokens
from tests.model_runner.fake_graphs import FakeGraphs
from tests.parallel.strict_ranks import StrictRanks
from tests.parallel.test_dp_attention import PANELS
from tests.parallel.tiny_ranks import answers_of_one, make_config, of_replicas
from tests.planted import Bug, Bugs

SIZES = [1, 2, 4]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("has_padding", [False, True])
def test_the_kernel_finds_what_torch_finds(num_ranks: int, has_padding: bool) -> None:
    """Over rows of a wider tensor, as they are gathered."""
    rng = torch.Generator().manual_seed(num_ranks)
    for num_rows, top_k in ((1, 1), (5, 3), (90, 8)):
        rows = torch.randint(-1, 12, (num_ranks * num_rows, 3 * top_k), generator=rng, dtype=torch.int32)
        weights, ids = rows[:, top_k : 2 * top_k].view(torch.float32), rows[:, 2 * top_k :]
        counts = torch.randint(0, num_rows + 1, (num_ranks,), generator=rng) if has_padding else None
        found = gathered_experts(weights, ids, counts, 4, 4)
        assert all(each.is_contiguous() for each in found)
        expected = find_by_torch(weights, ids, counts, 4, 4)
        assert torch.equal(found.topk_ids, expected.topk_ids)
        bits = [each.topk_weights.view(torch.int32) for each in (found, expected)]  # some are NaN
        assert torch.equal(*bits)


def test_replicas_replay_steps_of_one_size(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole panel in Triton's interpreter, with graphs: all ranks replay in each padded pass, also
    without a batch."""
    monkeypatch.setattr(
        dp_attention, "graphs_of_runner", lambda model, device, ranks: FakeGraphs(device, ranks)
    )
    config = make_config(folders["qwen3-moe"], cuda_graph_bs=SIZES, max_running_requests=4)
    expected = {req.rid: req.output_ids for req in answers_of_one(config)}
    reqs, replicas = of_replicas(config.updated(panel="optimized"), 2, ep=2, in_turn=True, only=("r0", "r2"))
    assert {req.rid: req.output_ids for req in reqs} == {rid: expected[rid] for rid in ("r0", "r2")}
    counts = {(each.runner.num_passes, each.runner.replays.steps) for each in replicas}
    assert len(counts) == 1
    ((num_passes, num_replays),) = counts
    assert 0 < num_replays < num_passes  # prompts and a last idle pass are not replayed


def test_padding_rows_choose_no_expert(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they read a slot of a request: only the dummy page is written."""
    seen: list[tuple[PassTokens, int, int]] = []
    run = PassDispatch.run

    def watched(self: PassDispatch, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        def count(all_x: torch.Tensor, here: TopKOutput) -> torch.Tensor:
            if self.is_padded:
                seen.append((self.tokens, len(all_x), int((here.topk_ids >= 0).sum())))
                assert torch.equal(here.topk_weights != 0, here.topk_ids >= 0)
            return experts(all_x, here)

        count.w13 = experts.w13
        return run(self, x, topk, count)

    monkeypatch.setattr(PassDispatch, "run", watched)
    config = make_config(
        folders["qwen3-moe"], cuda_graph_bs=SIZES, max_running_requests=4, **PANELS["optimized"]
    )
    of_replicas(config, 2)
    assert any(len(set(tokens.num_tokens)) > 1 and 0 in tokens.num_tokens for tokens, *_ in seen)
    for tokens, num_rows, num_choices in seen:
        size = next(size for size in SIZES if size >= max(tokens.num_tokens))
        assert num_rows == 2 * size
        assert num_choices == 2 * sum(tokens.num_tokens)  # each rank has a part of each expert


BEGIN, BUFFERS = PassDispatch.begin, decode_graph.DecodeBuffers.__init__
STEP = ScheduleInStep.step


def _lost_idle(self: ScheduleInStep) -> Any:
    """A replica without work stays away."""
    return STEP(self) if self.scheduler.has_work() else []


def _by_own_mode(self: Any, num_tokens: int, is_extend: bool, device: Any, num_nodes: int) -> PassTokens:
    """A rank pads its pass if it does not prefill itself."""
    tokens = BEGIN(self, num_tokens, is_extend, device, num_nodes)
    own = PassTokens((num_tokens,), False, (num_nodes,))
    self.num_rows = None if is_extend else self._smallest_of_all(own)
    return tokens


def _by_own_number(self: Any, num_tokens: int, is_extend: bool, device: Any, num_nodes: int) -> PassTokens:
    """The captured size follows from the tokens of this rank."""
    tokens = BEGIN(self, num_tokens, is_extend, device, num_nodes)
    if self.is_padded:
        self.num_rows = self._smallest_of_all(PassTokens((num_tokens,), False))
    return tokens


def _stale_counts(self: Any, num_tokens: int, is_extend: bool, device: Any, num_nodes: int) -> PassTokens:
    """Graphs read the numbers of tokens of the pass before."""
    before = self.counts(device).clone()
    tokens = BEGIN(self, num_tokens, is_extend, device, num_nodes)
    self.counts(device).copy_(before)
    return tokens


def _live_slot(self: Any, *args: Any) -> None:
    """Padding rows write to the first slot of the first request."""
    BUFFERS(self, *args)
    self.ints.padding[self.ints.rows["out_cache_loc"]] = 1


def _own_part_only(self: PassDispatch, summands: torch.Tensor, num_own: int) -> torch.Tensor:
    """A rank keeps the outputs of its own experts."""
    start = self.ranks.rank * num_own if self.is_padded else sum(self._nums[: self.ranks.rank])
    return summands[start : start + num_own]


WHERE = "diptych.optimized.parallel.dp_attention.PassDispatch"
PLANTED = Bugs("replicas in step", finder="answers of one rank")
for _name, (_where, _wrong) in {
    "lost IDLE": ("diptych.shared.engine.processes.replicas_in_step.ScheduleInStep.step", _lost_idle),
    "the own mode decides": (f"{WHERE}.begin", _by_own_mode),
    "the own number decides": (f"{WHERE}.begin", _by_own_number),
    "stale numbers of tokens": (f"{WHERE}.begin", _stale_counts),
    "padding in a live slot": ("diptych.optimized.graphs.decode_graph.DecodeBuffers.__init__", _live_slot),
    "no sum over ranks": (f"{WHERE}._scatter", _own_part_only),
}.items():
    PLANTED.add(_name, _wrong, where=_where)


@PLANTED.found_by(honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    config = make_config(folders["qwen3-moe"], cuda_graph_bs=SIZES, max_running_requests=4)
    config = config.updated(check_invariants=False)
    expected = [req.output_ids for req in answers_of_one(config)]
    bug.plant_in(monkeypatch)
    try:
        reqs, _ = of_replicas(config.updated(**PANELS["optimized"]), 2, seconds=3.0, impl=StrictRanks)
    except (AssertionError, RuntimeError, ValueError, EngineProcessEnded) as error:
        return {"answers of one rank": str(error)}
    return [req.output_ids for req in reqs] != expected
