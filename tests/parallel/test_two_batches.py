"""Two-batch overlap: the answers of whole batches; sums are under way while the other half computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from diptych.optimized.layers import RMSNorm
from diptych.optimized.parallel.collectives import Collectives as OptimizedCollectives
from diptych.reference.parallel.collectives import Collectives
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.processes.ranks import collectives_of
from diptych.shared.interfaces import Collectives as Interface
from diptych.shared.modeling import two_batches
from diptych.shared.modeling.two_batches import halves_of
from diptych.shared.parallel.in_step import DispatchInStep, PassTokens
from diptych.shared.parallel.turns import Turns, in_turns
from diptych.shared.tools.conformance.oracles.rank_threads import SECONDS, on_ranks
from diptych.shared.types import ForwardBatch, ForwardMode, Req
from tests.parallel.tiny_ranks import answers, answers_of_one, make_config, of_replicas
from tests.planted import Bug, Bugs

CPU = torch.device("cpu")
EAGLE = {"speculative": "eagle", "speculative_draft_model": "eagle-draft", "speculative_topk": 2}
MIXED = {"chunked_prefill_size": 8, "enable_mixed_chunk": True}
FLAGS: list[Any] = [
    ("llama", {}),
    ("llama", {"chunked_prefill_size": 8, "page_size": 4}),
    ("llama", MIXED | {"use": {"scheduler": "optimized", "collectives": "optimized"}}),
    ("llama", EAGLE),
    ("qwen3-moe", {"ep": 2}),
    ("qwen3-moe", {"ep": 2, "use": {"expert_dispatch": "reference"}}),
    ("latent rows", MIXED),
    pytest.param("llama", {"panel": "optimized"}, marks=pytest.mark.full),
    pytest.param("qwen3-moe", MIXED | {"panel": "optimized", "ep": 2}, marks=pytest.mark.full),
]


def of_ranks(config: EngineConfig, in_turn: bool = False) -> tuple[list[list[Req]], list[int]]:
    """The requests of each of two ranks, and how many passes each has cut."""

    def run(tp: Interface) -> tuple[list[Req], int]:
        assembly = assemble(config, clock=lambda: 0.0, tp=tp)
        return answers(assembly), assembly.parts.model_runner.run_model.num_passes

    found = on_ranks(2, run, impl=collectives_of(config), in_turn=in_turn)
    return [reqs for reqs, _ in found], [num for _, num in found]


@pytest.mark.parametrize(("model", "flags"), FLAGS)
def test_the_answers_are_those_of_whole_batches(
    folders: dict[str, str], model: str, flags: dict[str, Any]
) -> None:
    given = {name: folders.get(str(value), value) for name, value in flags.items()}
    alone = answers_of_one(make_config(folders[model], **{k: v for k, v in given.items() if k != "ep"}))
    config = make_config(folders[model], tp=2, two_batch_tokens=2, **given)
    ranks, nums = of_ranks(config, in_turn=config.panel == "optimized")
    assert [[req.output_ids for req in rank] for rank in ranks] == [[req.output_ids for req in alone]] * 2
    assert nums[0] == nums[1] >= len(alone)


IN_STEP: list[Any] = [
    {"two_batch_tokens": 9},  # some passes are not cut
    MIXED | {"ep": 2},
    {"tp": 2},
    pytest.param({"speculative": "ngram", "ep": 2}, marks=pytest.mark.full),
    {"speculative": "ngram", "speculative_topk": 1, "ep": 2},
    pytest.param({"panel": "optimized", "ep": 2}, marks=pytest.mark.full),
    pytest.param({"panel": "optimized", "tp": 2} | MIXED, marks=pytest.mark.full),
    pytest.param(
        {"panel": "optimized", "speculative": "ngram", "speculative_topk": 1}, marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize("flags", IN_STEP)
def test_replicas_that_share_experts(folders: dict[str, str], flags: dict[str, Any]) -> None:
    check_replicas(folders, flags)


def check_replicas(folders: dict[str, str], flags: dict[str, Any], seconds: float = SECONDS) -> None:
    """The passes of all ranks are cut, also of a rank with one token or none."""
    folder, given = folders["qwen3-moe"], {"two_batch_tokens": 2} | flags
    ep = given.pop("ep", 1)
    of_one = {name: value for name, value in given.items() if name not in ("tp", "two_batch_tokens")}
    expected = {req.rid: req.output_ids for req in answers_of_one(make_config(folder, **of_one))}
    config = make_config(folder, dp=2, dp_attention=True, **given)
    reqs, replicas = of_replicas(config, 2, seconds, ep=ep, in_turn=config.panel == "optimized")
    assert all(req.output_ids == expected[req.rid] for req in reqs)
    assert {req.rid for req in reqs} == set(expected)
    assert all(replica.runner.run_model.num_passes >= 2 for replica in replicas)


def batch_of(prefixes: list[int], lens: list[int]) -> ForwardBatch:
    """Requests in rows 7, 8, ..., with other values at each place."""
    num_tokens, starts = sum(lens), [sum(lens[:i]) for i in range(len(lens))]
    positions = [position for prefix, n in zip(prefixes, lens) for position in range(prefix, prefix + n)]
    return ForwardBatch(
        forward_mode=ForwardMode.MIXED,
        input_ids=torch.arange(num_tokens) + 100,
        positions=torch.tensor(positions),
        req_pool_indices=torch.arange(len(lens)) + 7,
        seq_lens=torch.tensor(prefixes) + torch.tensor(lens),
        out_cache_loc=torch.arange(num_tokens) + 1000,
        extend_seq_lens=torch.tensor(lens),
        extend_start_loc=torch.tensor(starts),
        seq_lens_cpu=tuple(map(sum, zip(prefixes, lens))),
        extend_seq_lens_cpu=tuple(lens),
        rows_cpu=tuple(range(7, 7 + len(lens))),
        rope_positions=torch.tensor([positions] * 3),
    )


@pytest.mark.parametrize("lens", [[2], [5, 1], [3, 3], [1, 1, 1], [1, 9], [2, 2, 3, 1]])
def test_two_halves_are_the_batch(lens: list[int]) -> None:
    prefixes = [4 * i for i in range(len(lens))]
    whole = batch_of(prefixes, lens)
    halves = halves_of(whole)
    assert [half.num_tokens for half in halves] == [(sum(lens) + 1) // 2, sum(lens) // 2]
    for name in ("input_ids", "positions", "out_cache_loc", "rope_positions"):
        parts = [getattr(half, name) for half in halves]
        assert torch.equal(torch.cat(parts, dim=-1), getattr(whole, name))
    for half in halves:
        assert half.rows_cpu == tuple(half.req_pool_indices.tolist())
        for name in ("seq_lens", "extend_seq_lens"):
            assert getattr(half, f"{name}_cpu") == tuple(getattr(half, name).tolist())
        ends = half.extend_start_loc + half.extend_seq_lens
        assert torch.equal(half.positions[ends - 1], half.seq_lens - 1)
        assert half.extend_start_loc.tolist() == [0, *ends.tolist()[:-1]]
        assert min(half.extend_seq_lens_cpu) > 0
    last = {row: n for half in halves for row, n in zip(half.rows_cpu or (), half.seq_lens_cpu)}
    assert last == dict(zip(whole.rows_cpu or (), whole.seq_lens_cpu))


def test_a_sum_is_under_way_while_the_other_half_computes() -> None:
    """Each rank starts the second sum before it waits for the first one."""

    class Watched(Collectives):
        def _finish(self, operation: Callable[..., Any], *args: Any) -> None:
            events.setdefault(self.rank, []).append("start")
            super()._finish(operation, *args)
            events[self.rank].append("end")

    events: dict[int, list[str]] = {}

    def run(tp: Interface) -> list[torch.Tensor]:
        def half(number: int) -> Callable[[], torch.Tensor]:
            return lambda: sum((tp.all_reduce(torch.tensor([number])) for _ in range(2)), torch.zeros(1))

        turns = Turns()
        tp.meanwhile = turns.pass_on
        return turns.run(half(1), half(10), CPU)

    assert [[x.item() for x in found] for found in on_ranks(2, run, impl=Watched)] == [[4, 40]] * 2
    assert events[0] == events[1] == ["start", "start", "end", "start", "end", "start", "end", "end"]


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_reduce_add_and_norm"])
def test_the_kernel_for_small_sums_passes_the_turn_on(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a half whose sums are small would overtake the other one."""
    small = OptimizedCollectives.__new__(OptimizedCollectives)
    calls, x = list[str](), torch.ones(2, 2, dtype=torch.int32)
    small._one_shot = MagicMock(dtypes=(torch.int32,))
    small.log, small.name, small.size = MagicMock(), "tp", 2
    small.meanwhile = lambda: calls.append(op)
    monkeypatch.setattr(OptimizedCollectives, "_is_small", lambda *_: True)
    norm = RMSNorm(2, 1e-6)
    getattr(small, op)(x, *([x, norm] if op.endswith("norm") else []))
    assert calls == [op]


def test_one_function_runs_at_a_time_in_inference_mode() -> None:
    turns, order, threads = Turns(), list[str](), set[int]()

    def steps(name: str, num: int) -> Callable[[], bool]:
        def function() -> bool:
            for i in range(num):
                order.append(f"{name}{i}")
                turns.pass_on()
            threads.add(threading.get_ident())
            return torch.is_inference_mode_enabled()

        return function

    with torch.inference_mode():
        assert turns.run(steps("a", 2), steps("b", 4), CPU) == [True, True]
    assert order == ["a0", "b0", "a1", "b1", "b2", "b3"]
    assert len(threads) == 2


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("passes", [0, 1])
def test_an_error_of_one_half_ends_both(failing: int, passes: int) -> None:
    turns, ended = Turns(), list[int]()

    def function(number: int) -> None:
        for _ in range(passes if number == failing else 9):
            turns.pass_on()
        if number == failing:
            raise MemoryError(f"half {number}")
        ended.append(number)

    with pytest.raises(MemoryError, match=f"half {failing}"):
        turns.run(lambda: function(0), lambda: function(1), CPU)
    assert ended == []
    assert "second half batch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 1}, "two_batch_tokens=8 needs several ranks"),
        ({"tp": 2, "pp": 2}, "two_batch_tokens=8 does not work with pp=2"),
        ({"tp": 1, "dp": 2}, "two_batch_tokens=8 needs .*dp > 1 with dp_attention"),
        ({"tp": 2, "two_batch_tokens": 1}, "two_batch_tokens must be an integer >= 2"),
    ],
)
def test_what_is_refused(folders: dict[str, str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(folders["llama"], **{"two_batch_tokens": 8} | flags)


def _second_first(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """The second half runs first: a request that is cut reads KV that is not there."""
    return HALVES(batch)[::-1]


def _length_of_the_whole(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """The first part of a request that is cut counts as long as the request."""
    first, second = HALVES(batch)
    last = dict(zip(second.rows_cpu or second.req_pool_indices.tolist(), second.seq_lens_cpu))
    rows = first.rows_cpu or first.req_pool_indices.tolist()
    lens = tuple(last.get(row, n) for row, n in zip(rows, first.seq_lens_cpu))
    return replace(first, seq_lens_cpu=lens, seq_lens=torch.tensor(lens)), second


HALVES = halves_of
PLANTED = Bugs("two batches", f"{two_batches.__name__}.halves_of", "other answers")
PLANTED.add_all(_second_first, _length_of_the_whole)


@PLANTED.found_by(honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    config = make_config(folders["llama"])
    alone = [req.output_ids for req in answers_of_one(config)]
    bug.plant_in(monkeypatch)
    ranks, _ = of_ranks(config.updated(tp=2, two_batch_tokens=2))
    return [[req.output_ids for req in rank] for rank in ranks] != [alone] * 2


def _halves_of_even_numbers(self: PassTokens, number: int) -> PassTokens:
    """Both halves of an odd number of tokens are rounded down."""
    return replace(self, num_tokens=tuple(num // 2 for num in self.num_tokens))


def _the_tokens_of_the_other(self: DispatchInStep, *args: Any) -> Any:
    """A half that gets the turn finds the numbers of the other half."""
    self.tokens = self.tokens and self.tokens.half(0)
    return in_turns(self.ranks, *args)


IN_STEP_BUGS = Bugs("two batches in step", finder="the answers, or an error")
for _name, _plant in (
    ("PassTokens.half", _halves_of_even_numbers),
    ("DispatchInStep.in_turns", _the_tokens_of_the_other),
):
    IN_STEP_BUGS.add_all(_plant, where=f"{PassTokens.__module__}.{_name}")


@IN_STEP_BUGS.found_by(AssertionError, RuntimeError)
def test_a_planted_bug_in_step_is_found(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    bug.plant_in(monkeypatch)
    check_replicas(folders, MIXED | {"ep": 2}, seconds=5.0)  # it waits for the other rank
    return False
