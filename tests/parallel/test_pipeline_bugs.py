"""Planted bugs of pipelines: wrong order, stale hidden states, rows of requests that left, lost tokens."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from diptych.optimized.parallel import pipeline as optimized
from diptych.optimized.parallel.stage_model import Entry
from diptych.reference.parallel.pipeline import PipelineScheduler, Stage
from diptych.shared.loading.pipeline_stages import layers_of
from diptych.shared.types import Req
from tests.parallel.test_pipeline_parallel import PANELS, of_stages, output_ids, retract_some
from tests.parallel.tiny_ranks import answers_of_one, make_config
from tests.planted import Bug, Bugs


def _all_stay(self: PipelineScheduler, launched: Any) -> list[Req | None]:
    """Retractions are not noticed."""
    return [req if self.requests.live.get(req.rid) is req else None for req in launched.batch.reqs]


def _from_one_buffer(self: Stage, x: torch.Tensor, to: int) -> Any:
    """Each micro-batch is sent from the same memory, while the one before may be on its way."""
    if x.dtype != torch.float32:
        return START_SEND(self, x, to)
    return START_SEND(self, _in_one_buffer(self, x), to)


def _ahead_from_one_buffer(self: optimized.Stage, x: torch.Tensor, to: int) -> None:
    SEND_AHEAD(self, _in_one_buffer(self, x), to)


def _in_one_buffer(stage: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(stage, "buffer"):
        stage.buffer = torch.zeros(100_000)
    sent: torch.Tensor = stage.buffer[: x.numel()].view(x.shape)
    return sent.copy_(x)


def _first_rows_only(self: Entry, x: torch.Tensor) -> None:
    """The buffer keeps hidden states of the batch before."""
    LOAD(self, x[: max(len(x) - 1, 1)])


def _newest_first(self: optimized.StagesInFlight, req: Req) -> int | None:
    """A request decodes from the first place that it had."""
    places = (each.place_of(req) for each in self.batches)
    return next((place - 1 for place in places if place is not None), None)


def _late_tokens(self: optimized.Launched) -> Any:
    """The tokens of the batch before are not waited for."""
    return self.future_map.resolve(self.forward_batch, self.has_ids)


def _without_the_last(self: optimized.StagesInFlight, running: Any) -> list[Req]:
    """Tokens in flight count twice: the last one is never decoded."""
    ahead = self.num_in_flight()
    return [req for req in running if len(req.output_ids) + 2 * ahead[req] < req.max_new_tokens - 1]


def _keep_rows(self: optimized.StagesInFlight, req: Req) -> None:
    """The rows of a request that has left stay in the batches in flight."""


def _slow(launch: Any) -> Any:
    def slow(self: Any, *args: Any) -> None:
        """The last stage lags behind."""
        if self.is_last:
            time.sleep(0.02)
        launch(self, *args)

    return slow


START_SEND, LAUNCH, LOAD = Stage._start_send, Stage.launch, Entry.load
SEND_AHEAD, LAUNCH_AHEAD = optimized.Stage._send, optimized.Stage.launch
PLANTED = Bugs("pipeline", finder="answers of one stage")
REFERENCE, OPTIMIZED = "diptych.reference.parallel.pipeline", "diptych.optimized.parallel.pipeline"
for _name, (_where, _wrong) in {
    "tokens of retracted requests are kept": (f"{REFERENCE}.PipelineScheduler._staying", _all_stay),
    "a send buffer is reused": (f"{REFERENCE}.Stage._start_send", _from_one_buffer),
    "layers are in reverse": (
        "diptych.shared.loading.pipeline_stages.layers_of",
        lambda num_layers, rank, size: layers_of(num_layers, size - 1 - rank, size),
    ),
    "ahead: a send buffer is reused": (f"{OPTIMIZED}.Stage._send", _ahead_from_one_buffer),
    "ahead: a row of the entry is stale": (
        "diptych.optimized.parallel.stage_model.Entry.load",
        _first_rows_only,
    ),
    "ahead: the wrong place of a token": (f"{OPTIMIZED}.StagesInFlight.place_of", _newest_first),
    "ahead: tokens are read before they are there": (f"{OPTIMIZED}.Launched.resolve", _late_tokens),
    "ahead: the last token is lost": (f"{OPTIMIZED}.StagesInFlight.decodable", _without_the_last),
    "ahead: rows of retracted requests are kept": (f"{OPTIMIZED}.StagesInFlight.drop", _keep_rows),
}.items():
    PLANTED.add(_name, _wrong, _name, where=_where)


@PLANTED.found_by(honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    alone = make_config(folders["llama"]).updated(check_invariants=False)
    expected = output_ids(answers_of_one(alone))
    monkeypatch.setattr(f"{REFERENCE}.Stage.launch", _slow(LAUNCH))
    monkeypatch.setattr(f"{OPTIMIZED}.Stage.launch", _slow(LAUNCH_AHEAD))
    panels = [
        panel for panel in PANELS if bug.plant is None or (panel == "optimized") == ("ahead" in bug.name)
    ]
    bug.plant_in(monkeypatch)
    for panel in panels:
        config = make_config(folders["llama"], **PANELS[panel]).updated(check_invariants=False)
        try:
            found = [output_ids(run.reqs) for run in of_stages(config, 2, retract_some, seconds=3.0)]
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:
            return {"answers of one stage": str(error)}
        if found != [expected] * 2:
            return True
    return False
