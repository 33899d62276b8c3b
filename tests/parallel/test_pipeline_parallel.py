"""Pipeline parallelism: the answers of one rank, and batches that are under way together."""

from __future__ import annotations

import json
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.optimized.parallel import pipeline as optimized
from diptych.optimized.parallel.stage_messages import HostMessages
from diptych.reference.parallel import pipeline as reference
from diptych.reference.parallel.pipeline import PipelineScheduler
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.processes.ranks import collectives_of
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.loading.pipeline_stages import layers_of
from diptych.shared.parallel.alone import ALONE
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import clauses_of
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import FinishAbort, Req, SamplingParams
from tests.parallel.tiny_ranks import LLAMA, QWEN3_MOE, answers, answers_of_one, make_config, requests
from tests.scheduler.late_streams import LateStreams

HOST_PARTS = (
    *("scheduler", "model_runner", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder"),
    "collectives",
)
PANELS: dict[str, dict[str, Any]] = {
    "reference": {},
    "optimized": {"use": dict.fromkeys(HOST_PARTS, "optimized")},  # without Triton's kernels
}
MAX_STEPS = 500
NUM_AHEAD = {"reference": 0, "optimized": 1}
"""Batches in flight beyond one for each stage."""
FLAGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunked_prefill_size": 8, "page_size": 4},
    "no radix cache": {"disable_radix_cache": True},
    "small pool": {"max_total_tokens": 80, "schedule_conservativeness": 0.1},
}
FOUR_LAYERS = {
    "llama": LLAMA | {"num_hidden_layers": 4},
    "tied": QWEN3_MOE | {"num_hidden_layers": 5, "mlp_only_layers": [0, 2]},
}


class Run(NamedTuple):
    """The run of one rank. `num_under_way`: the most batches together, behind a step."""

    assembly: Assembly
    reqs: list[Req]
    num_under_way: int


def of_stages(
    config: EngineConfig,
    size: int,
    disturb: Callable[[Any, int], None] = lambda scheduler, step: None,
    seconds: float = 60.0,
) -> list[Run]:
    """`disturb` is called before each step."""
    config = config.updated(pp=size)

    def run(group: Any) -> Run:
        assembly = assemble(config, clock=lambda: 0.0, tp=group)
        scheduler, reqs, most, step = assembly.scheduler, requests(), 0, 0
        assert isinstance(scheduler, (reference.PipelineScheduler, optimized.PipelineScheduler))
        for req in reqs:
            scheduler.add_request(req)
        while scheduler.has_work():
            assert step < MAX_STEPS, "requests do not end"
            disturb(scheduler, step)
            scheduler.step()
            most = max(most, len(scheduler.under_way))
            step += 1
        return Run(assembly, reqs, most)

    return on_ranks(config.num_ranks, run, seconds, impl=collectives_of(config), config=config)


def output_ids(reqs: list[Req]) -> list[list[int]]:
    return [req.output_ids for req in reqs]


def under_way(panel: str, size: int) -> int:
    """The most batches in flight between two steps."""
    return size - 1 + NUM_AHEAD[panel]


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        *(("llama", name) for name in FLAGS),
        *(("qwen3-moe", name) for name in ("chunks", "small pool")),
        *(pytest.param("qwen3-moe", name, marks=pytest.mark.full) for name in ("whole", "no radix cache")),
    ],
)
def test_stages_answer_as_one(folders: dict[str, str], model: str, flags: str, panel: str) -> None:
    config = make_config(folders[model], **FLAGS[flags], **PANELS[panel])
    expected = answers_of_one(make_config(folders[model], **FLAGS[flags]))
    for run in of_stages(config, 2):
        for req, alone in zip(run.reqs, expected):
            assert req.output_ids == alone.output_ids
            assert req.finished_reason == alone.finished_reason
            pairs = zip(
                req.input_logprobs + req.output_logprobs, alone.input_logprobs + alone.output_logprobs
            )
            for found, wanted in pairs:
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert run.num_under_way == under_way(panel, 2)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("name", FOUR_LAYERS)
@pytest.mark.parametrize("size", [3, 4])
def test_more_stages(tmp_path: Path, name: str, size: int, panel: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOUR_LAYERS[name]))
    config = make_config(str(tmp_path), **PANELS[panel])
    whole = assemble(make_config(str(tmp_path)))
    expected = output_ids(answers(whole))
    runs = of_stages(config, size)
    for run in runs:
        assert output_ids(run.reqs) == expected
        assert run.num_under_way == under_way(panel, size)
    counts = [sum(each.numel() for each in run.assembly.model.parameters()) for run in runs]
    num_whole = sum(each.numel() for each in whole.model.parameters())
    embedding = whole.model.model.embed_tokens.weight.numel()
    assert sum(counts) == num_whole + embedding * (name == "tied")  # a tied head is on the last rank too
    layers = [run.assembly.kv_pool.num_layers for run in runs]
    assert layers == [len(layers_of(sum(layers), rank, size)) for rank in range(size)]


def retract_some(scheduler: Any, step: int) -> None:
    if step % 3 == 2 and scheduler.under_way:
        reqs = scheduler.under_way[0].batch.reqs
        scheduler.retract(reqs[step % len(reqs)].rid)


@pytest.mark.parametrize("panel", PANELS)
def test_requests_that_leave_a_batch_under_way(folders: dict[str, str], panel: str) -> None:
    """The token of a retracted request is sampled again, that of an aborted one is dropped."""
    config = make_config(folders["llama"], **PANELS[panel])
    expected = output_ids(answers_of_one(make_config(folders["llama"])))
    for run in of_stages(config, 2, retract_some):
        assert output_ids(run.reqs) == expected
        assert sum(req.num_retractions for req in run.reqs) > 3

    def abort(scheduler: Any, step: int) -> None:
        if step == 5:
            assert scheduler.under_way
            assert not scheduler.flush_cache()
            scheduler.abort("r1")
            scheduler.abort("r2")

    for run in of_stages(config, 2, abort):
        for req, ids in zip(run.reqs, expected):
            is_aborted = req.rid in ("r1", "r2")
            assert isinstance(req.finished_reason, FinishAbort) == is_aborted
            assert req.output_ids == (ids[: len(req.output_ids)] if is_aborted else ids)
        assert run.assembly.scheduler.flush_cache()


@pytest.mark.parametrize("panel", PANELS)
def test_prompts_in_flight_are_running(folders: dict[str, str], panel: str) -> None:
    """So there are never more requests than `max_running_requests`, however many stages take prompts."""
    config = make_config(folders["llama"], **PANELS[panel]).updated(max_running_requests=2)
    expected = output_ids(answers_of_one(config))
    most = [0]

    def count(scheduler: Any, _: int) -> None:
        state = scheduler.state()
        most.append(len({req.rid for req in (*state.running, state.chunked_req) if req is not None}))

    for run in of_stages(config, 2, count):
        assert output_ids(run.reqs) == expected
    assert max(most) == 2


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_kernels_of_two_stages_answer_as_one(folders: dict[str, str], tp: int) -> None:
    """The optimized model, through Triton's interpreter: its blocks leave sums to the next norm, which a
    stage does not have. Steps are padded, and read hidden states from the buffer."""
    config = make_config(folders["llama"], panel="optimized", cuda_graph_bs=[2], cuda_graph_max_tokens=16)

    def ask(config: EngineConfig, group: Any = None) -> list[list[int]]:
        scheduler = assemble(config, clock=lambda: 0.0, tp=group).scheduler
        kept.append(scheduler)  # and the messages that the other rank has not received
        sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
        reqs = [Req(str(i), [5, 9, 31, 7 + i], sampling, seed=0) for i in range(2)]
        for req in reqs:
            scheduler.add_request(req)
        while scheduler.has_work():
            scheduler.step()
        return output_ids(reqs)

    kept: list[Any] = []
    expected = ask(config)
    config, impl = config.updated(tp=tp, pp=2), collectives_of(config)
    found = on_ranks(2 * tp, lambda group: ask(config, group), impl=impl, in_turn=True, config=config)
    assert found == [expected] * 2 * tp


OVERLAPPED: dict[str, dict[str, Any]] = {
    "mixed chunks": {"chunked_prefill_size": 8, "enable_mixed_chunk": True},
    "not ahead": {"disable_overlap_schedule": True},
}


@pytest.mark.parametrize("flags", OVERLAPPED)
def test_what_the_overlapped_pipeline_does_more(folders: dict[str, str], flags: str) -> None:
    config = make_config(folders["llama"], **PANELS["optimized"], **OVERLAPPED[flags])
    expected = output_ids(answers_of_one(make_config(folders["llama"])))
    for run in of_stages(config, 2):
        assert output_ids(run.reqs) == expected
        assert run.num_under_way == 1 + (flags != "not ahead")


def test_batches_are_forgotten(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch decodes from tokens of one before, but does not keep it and its tensors."""
    launched: list[Any] = []
    made = optimized.Launched.__post_init__

    def note(self: optimized.Launched) -> None:
        made(self)
        launched.append(weakref.ref(self))

    monkeypatch.setattr(optimized.Launched, "__post_init__", note)
    most = [0]
    config = make_config(folders["llama"], **PANELS["optimized"])
    of_stages(config, 2, lambda *_: most.append(sum(each() is not None for each in launched)))
    assert 0 < max(most) <= 2 * 4  # of two ranks: three in flight, and the one that is made


def test_a_request_that_reads_its_tokens_waits_for_them(folders: dict[str, str]) -> None:
    """Words of several tokens are banned by what the CPU has read, as grammars mask. Others run ahead."""
    banned = replace(requests()[0].sampling_params, bad_word_ids=((69, 69), (31, 31)))
    ahead: list[int] = []

    def ask(scheduler: Any) -> list[Req]:
        reqs = requests()
        for req in reqs[::2]:
            req.sampling_params = banned
        for req in reqs:
            scheduler.add_request(req)
        while scheduler.has_work():
            scheduler.step()
            counts = getattr(scheduler, "stages", None)
            ahead.extend(
                n for req, n in counts.num_in_flight().items() if req.needs_output
            ) if counts else None
        return reqs

    expected = output_ids(ask(assemble(make_config(folders["llama"])).scheduler))
    config = make_config(folders["llama"], **PANELS["optimized"]).updated(pp=2)

    def run(group: Any) -> tuple[Assembly, list[Req]]:
        assembly = assemble(config, clock=lambda: 0.0, tp=group)
        return assembly, ask(assembly.scheduler)

    for _, reqs in on_ranks(2, run, impl=collectives_of(config)):
        assert output_ids(reqs) == expected
    assert set(ahead) == {1}
    assert expected != output_ids(answers(assemble(make_config(folders["llama"]))))


class Late:
    """Three stages in one: batches are computed when they are launched, and their results come later."""

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(size=3)
        self.results: deque[Any] = deque()

    def launch(self, batch: Any, info: Any, parts: SchedulerParts) -> None:
        runner = parts.model_runner
        output, sampled = runner.forward_and_sample(batch, parts.sampler, info, parts.num_token_ids)
        self.results.append((sampled, output.input_logprobs))

    def finish(self) -> Any:
        return self.results.popleft()


class LateScheduler(PipelineScheduler):
    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        stage: Any = Late()
        super().__init__(config.updated(enable_mixed_chunk=False), model_config, parts, stage)


class LateAheadScheduler(optimized.PipelineScheduler):
    """Three stages in one whose batches are computed when something waits for them: memory that is freed
    while they are in flight has other contents by then."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        ranks: Any = SimpleNamespace(rank=2, size=3)
        stage = optimized.Stage(parts.model_runner, ranks, NoMessages(ranks))
        stage.is_first = True
        stage.streams = LateStreams(random.Random(0))
        parts.model_runner.is_late = True  # type: ignore[attr-defined]
        super().__init__(config, model_config, parts, stage)


class NoMessages(HostMessages):
    def send_tokens(self, results: Any) -> None:
        """There are no other stages."""


def schedules() -> list[Any]:
    """Schedules of the scheduler's contract; some of them in the fast cut."""
    names = ("any-schedule", "any-schedule-of-any-requests")
    clauses = [each for each in clauses_of("scheduler") if each.name in names]
    return [
        pytest.param(clause, case, marks=[] if i in (0, 5, 10) else [pytest.mark.full])
        for clause in clauses
        for i, case in enumerate(clause.cases)
    ]


@pytest.mark.parametrize("impl", [LateScheduler, LateAheadScheduler])
@pytest.mark.parametrize(("clause", "case"), schedules())
def test_any_schedule(clause: Clause, case: Any, impl: Any) -> None:
    clause.run(impl, case, None)


def test_layers_of_a_stage() -> None:
    assert [list(layers_of(5, rank, 3)) for rank in range(3)] == [[0], [1, 2], [3, 4]]
    with pytest.raises(ValueError, match="pp=3: a model of 2 layers"):
        layers_of(2, 0, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pp": 2, "tp": 2, "ep": 2}, "pp=2 does not work with ep=2"),
        (
            {"pp": 2, "num_continuous_decode_steps": 2},
            "num_continuous_decode_steps=2 does not work with pp=2",
        ),
        ({"pp": 2, "speculative": "ngram"}, "speculative=ngram; it must be None: stages pass on one token"),
        (
            {"pp": 2, "enable_mixed_chunk": True},
            "pp=2 does not work with enable_mixed_chunk=True in panel=ref",
        ),
        (
            {"pp": 2, "use": {"scheduler": "optimized"}},
            "these are scheduler=optimized, model_runner=reference",
        ),
        ({"pp": 2, "max_loras_per_batch": 2}, "do not work with pp=2"),
        ({"pp": 0}, "pp must be an integer >= 1"),
    ],
)
def test_what_cannot_run(folders: dict[str, str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(make_config(folders["llama"], **flags), tp=ALONE)
