"""Replicas that share experts and go on without one that has died, at any moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch

from diptych.reference.parallel.collectives import Collectives
from diptych.reference.parallel.dp_attention import PassDispatch
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.build.features.together import check_elastic_ep
from diptych.shared.engine.processes.child import EngineProcessEnded
from diptych.shared.engine.processes.replicas_in_step import ScheduleInStep, assemble_in_step
from diptych.shared.interfaces import MoE
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.survivors import COMPLETE, Survivors
from diptych.shared.types import FinishError
from tests.parallel.elastic_threads import Plant, Trap, die, in_threads
from tests.parallel.test_dp_attention import PANELS
from tests.parallel.test_drafts_in_step import CHAINS
from tests.parallel.tiny_ranks import answers_of_one, make_config, requests
from tests.planted import Bug, Bugs

ELASTIC: dict[str, Any] = {
    "dp": 3, "ep": 3, "ep_num_redundant_experts": 3, "dp_attention": True, "elastic_ep": True
}  # fmt: skip
ROOM_FOR_ONE = ELASTIC | {"ep_num_redundant_experts": 12}  # a rank has all experts


def run_all(controller: Any) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Output ids, of requests that come one per step, and the errors with which some end."""
    waiting, errors = requests(), dict[str, str]()
    found = {req.rid: list[int]() for req in waiting}
    for _ in range(500):
        if waiting:
            controller.add_request(waiting.pop(0))
        elif not controller.has_work():
            return found, errors
        for output in controller.step():
            found[output.rid] += output.new_token_ids
            if isinstance(output.finished_reason, FinishError):
                errors[output.rid] = output.finished_reason.message
    raise AssertionError("requests do not end")


def expert_of(scheduler: ScheduleInStep) -> ExpertManager:
    assert scheduler.survivors is not None
    return scheduler.survivors.experts


def dispatch_of(scheduler: ScheduleInStep) -> Any:
    return expert_of(scheduler).parallel[0].dispatch


def check_answers(model: str, found: dict[str, list[int]], errors: dict[str, str]) -> None:
    """The requests of replicas that have died end with an error, and no other one differs from one rank's."""
    expected = {req.rid: req.output_ids for req in answers_of_one(make_config(model))}
    assert {rid: ids for rid, ids in found.items() if rid not in errors} == {
        rid: ids for rid, ids in expected.items() if rid not in errors
    }
    for rid in errors:
        assert found[rid] == expected[rid][: len(found[rid])]


DEATHS: dict[str, Plant] = {
    "before a pass": lambda each: vars(Trap(dispatch_of(each), "begin", 5, die)),
    "in a layer": lambda each: vars(Trap(dispatch_of(each), "run", 12, die)),
    "behind a layer": lambda each: vars(Trap(dispatch_of(each), "run", 12, die, after=True)),
    "after a pass": lambda each: vars(Trap(each.runner, "_together", 6, die, after=True)),
    "while experts move": lambda each: vars(Trap(expert_of(each), "_move_layer", 4, die)),
}


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("death", DEATHS)
def test_a_replica_dies(folders: dict[str, str], panel: str, death: str) -> None:
    flags = dict(PANELS[panel])
    if death == "while experts move":
        flags["eplb_rebalance_num_iterations"] = 2
    config = make_config(folders["qwen3-moe"], **ELASTIC, **flags)
    controller, schedulers = in_threads(config, {1: DEATHS[death]})
    found, errors = run_all(controller)
    check_answers(folders["qwen3-moe"], found, errors)
    assert len(errors) == 1 + ("r4" in errors)
    assert controller.num_replicas == 2
    for each in (schedulers[0], schedulers[2]):
        assert expert_of(each).experts.physical_to_logical.shape == (2, 6)
        assert expert_of(each).num_reloaded > 0


def fail_behind_the_last_layer(each: ScheduleInStep) -> None:
    """Pass 6 fails on this replica, where the others complete it."""

    def fail() -> None:
        each.dp.is_broken = True
        raise RuntimeError("the connection is closed")

    vars(Trap(dispatch_of(each), "run", 12, fail, after=True))


@pytest.mark.parametrize("panel", PANELS)
def test_a_pass_that_only_some_complete(folders: dict[str, str], panel: str) -> None:
    """The others take part in its repetition, and do not repeat their own."""
    config = make_config(folders["qwen3-moe"], **ELASTIC, **PANELS[panel])
    plants = {1: DEATHS["after a pass"], 2: fail_behind_the_last_layer}
    controller, schedulers = in_threads(config, plants)
    check_answers(folders["qwen3-moe"], *run_all(controller))
    assert controller.num_replicas == 2
    assert schedulers[0].runner.num_passes == schedulers[2].runner.num_passes


MORE_DEATHS: dict[str, dict[int, Plant]] = {
    "one after the other": {
        1: DEATHS["in a layer"],
        2: lambda each: vars(Trap(dispatch_of(each), "begin", 9, die)),
    },
    "together": {1: DEATHS["in a layer"], 2: DEATHS["in a layer"]},
    "one while it takes over experts": {
        1: DEATHS["before a pass"],
        2: lambda each: vars(Trap(expert_of(each), "_move_layer", 2, die)),
    },
    "one while it meets the others": {
        1: DEATHS["behind a layer"],
        2: lambda each: vars(Trap(each.survivors, "_meet", 1, die)),
    },
    "one that has just met them": {
        1: DEATHS["after a pass"],
        2: lambda each: vars(Trap(each.survivors, "_meet", 1, die, after=True)),
    },
    "one while it repeats the pass": {
        1: DEATHS["in a layer"],
        2: lambda each: vars(Trap(each.survivors, "have_regrouped", 1, die)),
    },
}


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("deaths", MORE_DEATHS)
def test_two_replicas_die(folders: dict[str, str], panel: str, deaths: str) -> None:
    config = make_config(folders["qwen3-moe"], **ROOM_FOR_ONE, **PANELS[panel])
    controller, _ = in_threads(config, MORE_DEATHS[deaths])
    check_answers(folders["qwen3-moe"], *run_all(controller))
    assert controller.num_replicas == 1


@pytest.mark.parametrize("form", ["chunks", "drafts", "fp8"])
@pytest.mark.parametrize("panel", PANELS)
def test_forms(folders: dict[str, str], panel: str, form: str) -> None:
    flags = {"chunks": {"chunked_prefill_size": 8, "max_total_tokens": 64}, "drafts": CHAINS, "fp8": {}}[form]
    if form == "fp8":
        flags = {"quantization": "fp8"}
    model = folders["qwen3-moe"]
    config = make_config(model, **(flags | PANELS[panel]))
    expected = {req.rid: req.output_ids for req in answers_of_one(make_config(model, **flags))}
    controller, _ = in_threads(config.updated(**ELASTIC), {1: DEATHS["in a layer"]})
    found, errors = run_all(controller)
    assert all(found[rid] == expected[rid] for rid in expected if rid not in errors)
    assert controller.num_replicas == 2


def test_experts_come_from_the_checkpoint() -> None:
    """Each survivor has the weights of the experts that its map names."""
    config = make_config("tiny-moe").updated(load_format="auto")
    whole = assemble(config).model
    flags = ELASTIC | {"ep_num_redundant_experts": 4}
    controller, schedulers = in_threads(config.updated(**flags), {1: DEATHS["in a layer"]})
    run_all(controller)
    for rank, each in enumerate((schedulers[0], schedulers[2])):
        experts = expert_of(each)
        assert experts.num_reloaded > 0
        originals = (module for module in whole.modules() if isinstance(module, MoE))
        for layer, placed in zip(experts.layers, experts.experts.physical_to_logical):
            own, original = placed.view(2, -1)[rank], next(originals).experts
            assert torch.equal(layer.experts.w13, original.w13[own])
            assert torch.equal(layer.experts.w2, original.w2[own])


def test_no_room_ends_all(folders: dict[str, str]) -> None:
    config = make_config(folders["qwen3-moe"], **ELASTIC)
    controller, _ = in_threads(config, MORE_DEATHS["one after the other"])
    with pytest.raises(EngineProcessEnded, match=r"replica 2 .* replicas \[0\] have no room for all experts"):
        run_all(controller)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"dp_attention": False, "ep": 1, "ep_num_redundant_experts": 0},
            "dp_attention=False, it needs True",
        ),
        ({"tp": 2}, "ep=3, it needs 6: a dead replica"),
        ({"dp": 6}, "ep=3, it needs 6: a dead replica"),
        ({"two_batch_tokens": 8}, "two_batch_tokens=8, it needs None"),
        ({"dp": 1, "ep": 1, "ep_num_redundant_experts": 0}, "needs dp > 1"),
        ({"ep_num_redundant_experts": 0}, "ep_num_redundant_experts to at least 3"),
    ],
)
def test_what_cannot_heal(folders: dict[str, str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(make_config(folders["qwen3-moe"]).updated(**ELASTIC | flags), tp=ALONE)


def test_a_gpu_is_refused() -> None:
    config = EngineConfig(**ELASTIC, device="cuda:1")
    with pytest.raises(ValueError, match="device=cpu, and the device is cuda:1"):
        check_elastic_ep(config, 6, Collectives)


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.07, pytest.param(0.2, marks=pytest.mark.full)])
def test_processes_that_are_killed(folders: dict[str, str], capfd: Any, seconds: float) -> None:
    """SIGKILL at any moment: first to one replica, then to another one."""
    config = make_config(folders["qwen3-moe"], **ROOM_FOR_ONE)
    assembly = assemble_in_step(config, time_limit := 200.0)
    controller: Any = assembly.scheduler
    pids = [replica.process.pid for replica in controller.replicas[1:]]
    killers = [
        threading.Timer(seconds * (1 + i), os.kill, (pid, signal.SIGKILL)) for i, pid in enumerate(pids)
    ]
    for killer in killers:
        killer.start()
    start = time.monotonic()
    found, errors = run_all(controller)
    for killer in killers:
        killer.join()
    again, more = run_all(controller)
    assert time.monotonic() - start < time_limit / 2, "a rank has waited for the time limit"
    check_answers(folders["qwen3-moe"], found, errors)
    check_answers(folders["qwen3-moe"], again, more)
    assert controller.num_replicas == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
    said = capfd.readouterr().err
    assert all(f"replica {number} has ended with signal SIGKILL" in said for number in (1, 2))
    assert "died; its experts are with 0" in said


def _keeps_its_part(self: PassDispatch) -> None:
    """Tokens go to the experts that ranks had before."""


def _zeros(self: ExpertManager, numbers: Any, is_known: bool) -> None:
    """Experts that died are zeros."""

    def reload(placed: Any) -> int:
        rows = placed.physical_to_logical.unflatten(1, (self.ep, -1))[:, self.ranks.rank] >= 0
        for moe, row in zip(self.layers, rows):
            for parameter in moe.experts.parameters():
                parameter.data[row] = 0
        return int(rows.sum())

    self.reload = reload
    KEEP(self, numbers, is_known)


def _always_known(self: ExpertManager, numbers: Any, is_known: bool) -> None:
    """Ranks that died while experts moved have left the map of before."""
    KEEP(self, numbers, True)


def _takes_no_part(self: Survivors, take_part: Any, num_passes: int) -> None:
    """A rank that has completed the pass leaves the others alone."""
    if self.are_behind:
        self._regroup(num_passes, COMPLETE)


def _counts_as_complete(self: Survivors, run: Any, take_part: Any, num_passes: int) -> Any:
    """A pass that failed counts as complete: the others do not take part in its repetition."""
    while True:
        try:
            return run()
        except RuntimeError as error:
            self._forgive(error)
        self._regroup(num_passes, COMPLETE)


KEEP = ExpertManager.keep
BUGS = Bugs("elastic EP", finder="answers of one rank, or an error")
BUGS.add_all(_keeps_its_part, where=PassDispatch.have_regrouped)
BUGS.add_all(_zeros, _always_known, where=KEEP)
BUGS.add_all(_takes_no_part, where=Survivors.catch_up)
BUGS.add_all(_counts_as_complete, where=Survivors.to_the_end)


@BUGS.found_by(AssertionError, RuntimeError, honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug.plant_in(monkeypatch)
    monkeypatch.setattr("diptych.shared.parallel.survivors.CALL_SECONDS", 1.0)
    flags: dict[str, Any] = {}
    plants = {1: DEATHS["after a pass"], 2: fail_behind_the_last_layer}
    if bug.name in ("always_known", "zeros"):
        flags, plants = {"eplb_rebalance_num_iterations": 2}, {1: DEATHS["while experts move"]}
    config = make_config(folders["qwen3-moe"], **ELASTIC, **flags)
    controller, _ = in_threads(config, plants, seconds=2.0)
    check_answers(folders["qwen3-moe"], *run_all(controller))
