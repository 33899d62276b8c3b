"""Drafting in graphs, played on a CPU: the same trees as without, and the same text as without any drafts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.optimized.graphs.cuda_graph import graphs_of_drafter
from diptych.optimized.speculative.dflash import DFlashDrafter
from diptych.optimized.speculative.draft_beams import BeamSteps
from diptych.optimized.speculative.eagle import EagleDrafter
from diptych.optimized.speculative.standalone import StandaloneDrafter
from diptych.shared import registry
from diptych.shared.config import EngineConfig, draft_shape
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.interfaces import Drafter, DrafterParts
from diptych.shared.parallel.alone import Alone
from diptych.shared.speculation.adaptive_shape import AdaptiveShape
from diptych.shared.speculation.draft_model_base import padding_token_ids
from diptych.shared.tools.bench.round_cost import pieces_of
from diptych.shared.tools.bench.step_inputs import fill_pool
from diptych.shared.tools.conformance.contracts.drafter import drafting as clauses
from diptych.shared.tools.conformance.contracts.drafter.drafting import Setting
from diptych.shared.tools.conformance.oracles.replanned_attention import attention_for_graphs
from diptych.shared.types import Beams, DraftBatch, DraftShape, DraftTree, ForwardBatch
from tests.model_runner.fake_graphs import FakeGraphs, FakeGraphsRunner

SHAPE = DraftShape(3, 2, 6)


class OnGpu:
    """The drafter as it is on a GPU."""

    parts: DrafterParts

    def _cuda_graphs(self) -> FakeGraphs:
        self.made: FakeGraphs = FakeGraphs.made_by(graphs_of_drafter, self.parts.model)
        return self.made


class FakeGraphsDrafter(OnGpu, EagleDrafter):  # type: ignore[misc]
    pass


class FakeGraphsStandalone(OnGpu, StandaloneDrafter):  # type: ignore[misc]
    pass


class FakeGraphsDFlash(OnGpu, DFlashDrafter):  # type: ignore[misc]
    pass


def engine(drafter: type[Drafter], runner: type | None = None, **flags: Any) -> Assembly:
    config = EngineConfig(
        model="tiny-dense",
        panel="reference",
        device="cpu",
        max_total_tokens=1024,
        context_len=256,
        cuda_graph_bs=(1, 2, 4),
        **{"max_running_requests": 5, **Setting("", algorithm="eagle3", shape=SHAPE).flags(), **flags},
    )
    attention = attention_for_graphs(torch.float32)
    runners = {} if runner is None else {"model_runner": runner}
    return assemble(config, replace={"drafter": drafter, "attention": attention, **runners})


@pytest.mark.full
@pytest.mark.parametrize("shape", [DraftShape(3, 1, 4), SHAPE], ids=str)
def test_a_language_model_drafts_in_graphs(shape: DraftShape) -> None:
    """The target itself: what it drafts in a chain is accepted."""
    setting = Setting("", algorithm="standalone", shape=shape)
    assembly = engine(FakeGraphsStandalone, **setting.flags())
    expected = clauses.answers_alone(setting.max_new_tokens, 0.0)
    assert clauses.answers(assembly, setting.max_new_tokens) == expected
    assert assembly.parts.drafter.graphs[0].num_replays > 5
    stats = assembly.scheduler.stats().speculation
    assert stats.acceptance_rate == 1.0 if shape.top_k == 1 else stats.acceptance_rate > 0.2


@pytest.mark.parametrize("shape", [SHAPE, DraftShape(3, 1, 4), DraftShape(1, 3, 4)], ids=str)
def test_answers_are_those_without_drafts(shape: DraftShape) -> None:
    setting = Setting("", algorithm="eagle3", shape=shape)
    assembly = engine(FakeGraphsDrafter, **setting.flags())
    expected = clauses.answers_alone(setting.max_new_tokens, 0.0)
    assert clauses.answers(assembly, setting.max_new_tokens) == expected
    assert assembly.parts.drafter.graphs[0].num_replays > 10


def test_blocks_are_drafted_in_graphs() -> None:
    setting = Setting("", algorithm="dflash", shape=DraftShape(7, 1, 8))
    assembly = engine(FakeGraphsDFlash, **setting.flags())
    expected = clauses.answers_alone(setting.max_new_tokens, 0.0)
    assert clauses.answers(assembly, setting.max_new_tokens) == expected
    assert assembly.parts.drafter.graphs[0].num_replays > 10


def states(drafter: EagleDrafter) -> tuple[torch.Tensor, ...]:
    """States of all requests: the dummy row belongs to no request."""
    kv = drafter.kv_pool.k_buffer(0), drafter.kv_pool.v_buffer(0)
    return *(values[1:].clone() for values in drafter.last_rows), *(values[1:].clone() for values in kv)


def test_replays_are_what_is_launched() -> None:
    """At every batch size, one after the other, so that padding finds what was there before."""
    assembly = engine(FakeGraphsDrafter)
    drafter: Any = assembly.parts.drafter
    fill_pool(assembly.kv_pool)
    for values in drafter.last_rows:
        values.normal_()
    for bs in (4, 1, 3, 2, 5):
        with pieces_of(assembly.parts, draft_shape(assembly.config), bs, 40) as pieces:
            num_before = drafter.graphs[0].num_replays
            tree = {name: values.clone() for name, values in vars(pieces["draft"]()).items()}
            drafted = states(drafter)
            pieces["extend"]()
            extended = states(drafter)
            assert drafter.graphs[0].num_replays - num_before == (2 if bs <= 4 else 0)
            calls, drafter.graphs[0]._calls = drafter.graphs[0]._calls, {}
            for values, before in zip(drafter.last_rows, drafted):
                values[1:] = before
            launched: DraftTree = pieces["draft"]()
            for name, values in vars(launched).items():
                assert torch.equal(values, tree[name]), (bs, name)
            pieces["extend"]()
            drafter.graphs[0]._calls = calls
            for found, expected in zip(extended, states(drafter)):
                # GEMMs that include padding rows may sum in another order.
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5), bs


def test_every_shape_that_may_be_drafted_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape changes after each verification, whatever was accepted. (Who runs ahead gives bounds, which
    this attention does not take.)"""

    class Waits(FakeGraphsDrafter):
        runs_ahead = False

    def turn(adaptive: AdaptiveShape, *_: int) -> None:
        adaptive.level = (adaptive.level + 1) % len(adaptive.shapes)

    monkeypatch.setattr(AdaptiveShape, "record", turn)
    setting = Setting("", algorithm="eagle3", shape=DraftShape(5, 2, 8))
    assembly = engine(
        Waits, **setting.flags(), speculative_auto=True, runner=FakeGraphsRunner,
        max_running_requests=4, cuda_graph_max_tokens=0, use={"scheduler": "optimized"},
    )  # fmt: skip
    expected = clauses.answers_alone(setting.max_new_tokens, 0.0)
    assert clauses.answers(assembly, setting.max_new_tokens) == expected
    graphs, runner = assembly.parts.drafter.graphs, assembly.parts.model_runner
    assert [of_shape.shape for of_shape in graphs] == [(5, 2, 8), (4, 2, 7), (2, 2, 4), (1, 2, 3)]
    assert min(of_shape.num_replays for of_shape in graphs) > 1
    assert [steps.buffers.num_nodes for steps in runner.steps.verify if steps.by_size] == [8, 7, 4, 3]
    assert runner.replays.steps >= sum(of_shape.num_replays for of_shape in graphs)


@pytest.mark.parametrize(
    "drafter", [FakeGraphsDrafter, pytest.param(FakeGraphsStandalone, marks=pytest.mark.full)]
)
def test_all_graphs_of_an_engine_share_a_pool(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts come first: what verification replays must not lie under a tree. A head that the draft model
    shares contains collectives of the target's ranks."""
    ranks, pools = Alone(), []
    allocate = drafter.allocate

    def allocate_with_ranks(self: Any, *args: Any) -> None:
        self.parts.model.tp = ranks
        allocate(self, *args)
        pools.append((self.made, len(self.made.calls)))

    class Runner(FakeGraphsRunner):
        @staticmethod
        def make_graphs(*args: Any) -> FakeGraphs:
            pools.append((FakeGraphsRunner.make_graphs(*args), 0))
            return pools[-1][0]

    monkeypatch.setattr(drafter, "allocate", allocate_with_ranks)
    algorithm = "eagle3" if drafter is FakeGraphsDrafter else "standalone"
    flags = Setting("", algorithm=algorithm, shape=SHAPE).flags()
    engine(drafter, Runner, **flags, cuda_graph_max_tokens=0)
    (of_drafter, num_drafts), (of_runner, _) = pools
    assert of_drafter is of_runner
    assert of_runner.ranks is ranks
    assert num_drafts == 2 * 3, "a draft and an extension of each size, before the target's graphs"
    assert len(of_runner.calls) > num_drafts
    pools.clear()
    engine(EagleDrafter, Runner, cuda_graph_max_tokens=0)
    assert pools[0][0] is not of_runner, "another engine has another pool"


def test_another_shape_is_launched() -> None:
    assembly = engine(FakeGraphsDrafter)
    drafter: Any = assembly.parts.drafter
    with pieces_of(assembly.parts, draft_shape(assembly.config), 2, 40):
        num_before = drafter.graphs[0].num_replays
        assert drafter.graphs[0].draft(_batch(drafter, 2), DraftShape(2, 2, 5)) is None
        assert drafter.graphs[0].draft(_batch(drafter, 5), SHAPE) is None
        assert drafter.graphs[0].num_replays == num_before


def _batch(drafter: Any, bs: int) -> DraftBatch:
    zeros = torch.zeros(bs, dtype=torch.int64)
    slots = torch.zeros(bs, drafter.graphs[0].num_slots, dtype=torch.int64)
    return DraftBatch([None] * bs, zeros, zeros, zeros, (0,) * bs, slots)  # type: ignore[list-item]


def test_extensions_of_ragged_batches_are_launched() -> None:
    """A prompt, and what a scheduler that waits says of an accepted path."""
    drafter: Any = engine(FakeGraphsDrafter).parts.drafter
    forward_batch, hidden_states, next_token_ids = drafter.graphs[0].buffers_of_extend(2)
    ragged = ForwardBatch(**{**vars(forward_batch), "num_kept": None})
    assert not drafter.graphs[0].extend(ragged, hidden_states, next_token_ids)
    assert drafter.graphs[0].extend(forward_batch, hidden_states, next_token_ids)


def test_attention_that_cannot_be_captured_is_said_once() -> None:
    attention = registry.load("attention", "reference")
    config = engine(EagleDrafter).config
    with pytest.warns(RuntimeWarning, match="drafting launches kernel by kernel: TorchAttention"):
        assembly = assemble(config, replace={"drafter": FakeGraphsDrafter, "attention": attention})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = clauses.answers_alone(8, 0.0)
        assert clauses.answers(assembly, 8) == expected
    drafter: Any = assembly.parts.drafter
    assert drafter.graphs[0].num_replays == 0


def test_ids_without_a_token_are_never_drafted() -> None:
    assembly, num_token_ids = engine(EagleDrafter), 1000  # of the head's 1,088 ids some are larger
    drafter: Any = assembly.parts.drafter
    assert drafter.is_no_token is None
    few = replace(drafter.parts, num_token_ids=num_token_ids)
    drafter.is_no_token = padding_token_ids(assembly.config, few, drafter.draft_config, drafter.model)
    hidden_size = drafter.draft_config.model.hidden_size
    hidden_states = torch.randn(50, hidden_size, generator=torch.Generator().manual_seed(0))
    logits = drafter.model.compute_logits(hidden_states)
    best = drafter.model.to_target_ids(logits.topk(4).indices)
    assert int(best.max()) >= num_token_ids, "a case of the kind that is excluded"
    assert int(drafter._top_tokens(hidden_states, 4).token_ids.max()) < num_token_ids
    drafter.is_no_token = None  # every id is a token
    assert torch.equal(drafter._top_tokens(hidden_states, 4).token_ids.sort().values, best.sort().values)


@pytest.mark.parametrize("bs", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_steps_are_made_of_contiguous_tensors(bs: int, k: int) -> None:
    """Kernels count on it; an expanded tensor of one request is flattened without a copy."""
    ids = torch.arange(bs * k).view(bs, k)
    beams = Beams(ids, torch.ones(bs, k), torch.zeros_like(ids), ids, ids, torch.ones(bs, k))
    zeros = torch.zeros(bs, dtype=torch.int64)
    slots = torch.arange(100, 100 + 4 * k * bs).view(bs, 4 * k)
    batch = DraftBatch([], zeros, zeros, zeros + torch.arange(7, 7 + bs), (9,) * bs, slots[:, : 3 * k])
    pool = registry.load("memory_pool", "reference").ReqToTokenPool(2, 50, torch.device("cpu"))
    steps = BeamSteps(batch, 0, pool, 9)
    for step in range(3):
        forward_batch = steps.next(beams)
        for name, value in vars(forward_batch).items():
            assert not isinstance(value, torch.Tensor) or value.is_contiguous(), name
        assert forward_batch.positions.tolist() == [min(7 + i + step, 8) for i in range(bs) for _ in range(k)]
        assert torch.equal(forward_batch.out_cache_loc.view(bs, k), slots[:, step * k : step * k + k])
