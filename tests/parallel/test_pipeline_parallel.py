"""Pipeline parallelism: the answers of one rank, and batches that are under way together."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from diptych.reference.parallel.pipeline import PipelineScheduler, Stage
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.loading.pipeline_stages import layers_of
from diptych.shared.parallel.alone import ALONE
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import clauses_of
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import FinishAbort, Req
from tests.parallel.tiny_ranks import LLAMA, QWEN3_MOE, answers, make_config, requests
from tests.planted import Bug, Bugs

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
    """The run of one rank. `num_under_way`: the most batches together."""

    assembly: Assembly
    reqs: list[Req]
    num_under_way: int


def of_stages(
    config: EngineConfig,
    size: int,
    disturb: Callable[[PipelineScheduler, int], None] = lambda scheduler, step: None,
) -> list[Run]:
    """`disturb` is called before each step."""

    def run(group: Any) -> Run:
        assembly = assemble(config.updated(pp=size), clock=lambda: 0.0, tp=group)
        scheduler, reqs, most, step = assembly.scheduler, requests(), 0, 0
        assert isinstance(scheduler, PipelineScheduler)
        for req in reqs:
            scheduler.add_request(req)
        while scheduler.has_work():
            disturb(scheduler, step)
            scheduler.step()
            most = max(most, len(scheduler.under_way))
            step += 1
        return Run(assembly, reqs, most + 1)

    return on_ranks(size, run)


def output_ids(reqs: list[Req]) -> list[list[int]]:
    return [req.output_ids for req in reqs]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        *(("llama", name) for name in FLAGS),
        *(("qwen3-moe", name) for name in ("chunks", "small pool")),
        *(pytest.param("qwen3-moe", name, marks=pytest.mark.full) for name in ("whole", "no radix cache")),
    ],
)
def test_stages_answer_as_one(folders: dict[str, str], model: str, flags: str) -> None:
    config = make_config(folders[model], **FLAGS[flags])
    expected = answers(assemble(config))
    for run in of_stages(config, 2):
        for req, alone in zip(run.reqs, expected):
            assert req.output_ids == alone.output_ids
            assert req.finished_reason == alone.finished_reason
            pairs = zip(
                req.input_logprobs + req.output_logprobs, alone.input_logprobs + alone.output_logprobs
            )
            for found, wanted in pairs:
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert run.num_under_way == 2


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if (name == "tied") == (size == 4) else pytest.mark.full)
        for name in FOUR_LAYERS
        for size in (3, 4)
    ],
)
def test_more_stages(tmp_path: Path, name: str, size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOUR_LAYERS[name]))
    config = make_config(str(tmp_path))
    whole = assemble(config)
    expected = output_ids(answers(whole))
    runs = of_stages(config, size)
    for run in runs:
        assert output_ids(run.reqs) == expected
        assert run.num_under_way == size
    counts = [sum(each.numel() for each in run.assembly.model.parameters()) for run in runs]
    num_whole = sum(each.numel() for each in whole.model.parameters())
    embedding = whole.model.model.embed_tokens.weight.numel()
    assert sum(counts) == num_whole + embedding * (name == "tied")  # a tied head is on the last rank too
    layers = [run.assembly.kv_pool.num_layers for run in runs]
    assert layers == [len(layers_of(sum(layers), rank, size)) for rank in range(size)]


def retract_some(scheduler: PipelineScheduler, step: int) -> None:
    if step % 3 == 2 and scheduler.under_way:
        reqs = scheduler.under_way[0].batch.reqs
        scheduler.retract(reqs[step % len(reqs)].rid)


def test_requests_that_leave_a_batch_under_way(folders: dict[str, str]) -> None:
    """The token of a retracted request is sampled again, that of an aborted one is dropped."""
    config = make_config(folders["llama"])
    expected = output_ids(answers(assemble(config)))
    for run in of_stages(config, 2, retract_some):
        assert output_ids(run.reqs) == expected
        assert sum(req.num_retractions for req in run.reqs) > 3

    def abort(scheduler: PipelineScheduler, step: int) -> None:
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


def test_prompts_in_flight_are_running(folders: dict[str, str]) -> None:
    """So there are never more requests than `max_running_requests`, however many stages take prompts."""
    config = make_config(folders["llama"]).updated(max_running_requests=2)
    expected = output_ids(answers(assemble(config)))
    most = [0]

    def count(scheduler: PipelineScheduler, _: int) -> None:
        state = scheduler.state()
        most.append(len({req.rid for req in (*state.running, state.chunked_req) if req is not None}))

    for run in of_stages(config, 2, count):
        assert output_ids(run.reqs) == expected
    assert max(most) == 2


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


def schedules() -> list[Any]:
    """Schedules of the scheduler's contract; some of them in the fast cut."""
    names = ("any-schedule", "any-schedule-of-any-requests")
    clauses = [each for each in clauses_of("scheduler") if each.name in names]
    return [
        pytest.param(clause, case, marks=[] if i in (0, 5, 10) else [pytest.mark.full])
        for clause in clauses
        for i, case in enumerate(clause.cases)
    ]


@pytest.mark.parametrize(("clause", "case"), schedules())
def test_any_schedule(clause: Clause, case: Any) -> None:
    clause.run(LateScheduler, case, None)


def test_layers_of_a_stage() -> None:
    assert [list(layers_of(5, rank, 3)) for rank in range(3)] == [[0], [1, 2], [3, 4]]
    with pytest.raises(ValueError, match="pp=3: a model of 2 layers"):
        layers_of(2, 0, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pp": 2, "tp": 2}, "pp=2 does not work with tp=2"),
        ({"pp": 2, "speculative": "ngram"}, "speculative=ngram; it must be None: stages pass on one token"),
        ({"pp": 2, "enable_mixed_chunk": True}, "pp=2 does not work with enable_mixed_chunk=True"),
        ({"pp": 2, "use": {"scheduler": "optimized"}}, "pp=2 runs in panel=reference without use"),
        ({"pp": 0}, "pp must be an integer >= 1"),
    ],
)
def test_what_cannot_run(folders: dict[str, str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(make_config(folders["llama"], **flags), tp=ALONE)


def _all_stay(self: PipelineScheduler, launched: Any) -> list[Req | None]:
    """Retractions are not noticed."""
    return [req if self.requests.live.get(req.rid) is req else None for req in launched.batch.reqs]


def _from_one_buffer(self: Stage, x: torch.Tensor, to: int) -> Any:
    """Each micro-batch is sent from the same memory, while the one before may be on its way."""
    if x.dtype != torch.float32:
        return START_SEND(self, x, to)
    if not hasattr(self, "buffer"):
        self.buffer = torch.zeros(100_000)  # type: ignore[attr-defined]
    sent = self.buffer[: x.numel()].view(x.shape)  # type: ignore[attr-defined]
    sent.copy_(x)
    return START_SEND(self, sent, to)


def _slow(self: Stage, *args: Any) -> None:
    """The last stage lags behind."""
    if self.is_last:
        time.sleep(0.02)
    LAUNCH(self, *args)


START_SEND, LAUNCH = Stage._start_send, Stage.launch
PLANTED = Bugs("pipeline", finder="answers of one stage")
for _name, (_where, _wrong) in {
    "tokens of retracted requests are kept": (
        "diptych.reference.parallel.pipeline.PipelineScheduler._staying",
        _all_stay,
    ),
    "a send buffer is reused": ("diptych.reference.parallel.pipeline.Stage._start_send", _from_one_buffer),
    "layers are in reverse": (
        "diptych.shared.loading.pipeline_stages.layers_of",
        lambda num_layers, rank, size: layers_of(num_layers, size - 1 - rank, size),
    ),
}.items():
    PLANTED.add(_name, _wrong, _name, where=_where)


@PLANTED.found_by(honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    config = make_config(folders["llama"]).updated(check_invariants=False)
    expected = output_ids(answers(assemble(config)))
    monkeypatch.setattr("diptych.reference.parallel.pipeline.Stage.launch", _slow)
    bug.plant_in(monkeypatch)
    try:
        found = [output_ids(run.reqs) for run in of_stages(config, 2, retract_some)]
    except (AssertionError, RuntimeError) as error:
        return {"answers of one stage": str(error)}
    return found != [expected] * 2
