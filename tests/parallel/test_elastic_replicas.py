"""Replicas of several ranks that go on without one of them, whichever of its ranks has died."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch

from diptych.shared.engine.processes.replicas_in_step import ScheduleInStep, assemble_in_step
from diptych.shared.parallel.grid import groups_of
from diptych.shared.parallel.in_step import DispatchInStep
from diptych.shared.parallel.survivors import Survivors
from tests.parallel.elastic_threads import Plant, Threads, Trap, die
from tests.parallel.test_dp_attention import PANELS
from tests.parallel.test_drafts_in_step import CHAINS
from tests.parallel.test_elastic_ep import DEATHS, check_answers, dispatch_of, expert_of, run_all
from tests.parallel.tiny_ranks import make_config
from tests.planted import Bug, Bugs

DIVIDED: dict[str, Any] = {
    "dp": 3, "tp": 2, "ep": 6, "ep_num_redundant_experts": 6, "dp_attention": True, "elastic_ep": True
}  # fmt: skip
ROOM_FOR_ONE = DIVIDED | {"ep_num_redundant_experts": 12}


class Divided(Threads):
    def check(self, model: str, num_left: int, left: tuple[int, ...]) -> None:
        try:
            found, errors = run_all(self.controller)
            check_answers(model, found, errors)
            assert self.controller.num_replicas == num_left
        finally:
            self.controller.ended("the test is over")
            for thread in self.threads:
                thread.join(10)
        passes = {self.schedulers[rank].runner.num_passes for rank in left}
        assert len(passes) == 1
        for place, rank in enumerate(left):
            groups = groups_of(dispatch_of(self.schedulers[rank]).all_ranks)
            assert [(group.rank, group.size) for group in groups] == [
                (place, len(left)), (rank % 2, 2), (place // 2, num_left)
            ]  # fmt: skip


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_of_a_replica_dies(folders: dict[str, str], panel: str, part: int, death: str) -> None:
    """The other one goes with it; the other replicas, of two ranks each, go on."""
    flags = dict(PANELS[panel])
    if death == "while experts move":
        flags["eplb_rebalance_num_iterations"] = 2
    config = make_config(folders["qwen3-moe"], **DIVIDED, **flags)
    threads = Divided(config, {2 + part: DEATHS[death]})
    threads.check(folders["qwen3-moe"], 2, (0, 1, 4, 5))
    experts = [expert_of(threads.schedulers[rank]) for rank in (0, 1, 4, 5)]
    assert all(each.experts.physical_to_logical.shape == (2, 8) for each in experts)
    num_reloaded = sum(each.num_reloaded for each in experts)  # the others have replicas of all experts
    assert (num_reloaded > 0) == (death == "while experts move")


def fail(groups: tuple[Any, ...], number: int) -> None:
    groups[number].is_broken = True
    raise RuntimeError("the connection is closed")


def fails_at(name: str, number: int, group: int) -> Plant:
    """In pass 6 a rank misses another one, where all of its replica could complete the pass."""

    def plant(each: ScheduleInStep) -> None:
        groups = groups_of(dispatch_of(each).all_ranks)
        target = dispatch_of(each) if name == "run" else each.survivors.tp  # type: ignore[union-attr]
        if name != "all_reduce":
            vars(Trap(target, name, number, lambda: fail(groups, group), after=True))
            return
        inner, seen = target.all_reduce, [0]

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            if x.shape == (1,):  # behind a pass
                seen[0] += 1
                if seen[0] == number:
                    fail(groups, group)
            return inner(x)

        target.all_reduce = all_reduce

    return plant


def late(each: ScheduleInStep) -> None:
    """It misses another one behind pass 4, when the lead of its replica is in pass 5 already."""
    groups, target = groups_of(dispatch_of(each).all_ranks), each.survivors.tp  # type: ignore[union-attr]
    inner, seen = target.all_reduce, [0]

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        result = inner(x)
        if x.shape == (1,):  # behind a pass
            seen[0] += 1
            if seen[0] == 4:
                time.sleep(1.0)
                fail(groups, 1)
        return result

    target.all_reduce = all_reduce


HALF_DONE: dict[str, dict[int, Plant]] = {
    "one rank has the last layer, the other one has not": {5: fails_at("run", 12, 2)},
    "one rank misses the other one behind the pass": {4: fails_at("all_reduce", 6, 1)},
    "one rank has the tokens, the other one has not": {5: fails_at("broadcast", 4, 1)},
    "two replicas": {0: fails_at("run", 12, 2), 5: fails_at("all_reduce", 6, 1)},
}


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("faults", HALF_DONE)
def test_ranks_of_a_replica_repeat_a_pass_together(folders: dict[str, str], panel: str, faults: str) -> None:
    """Or not at all: replicas that have completed it take part in that of the others."""
    config = make_config(folders["qwen3-moe"], **DIVIDED, **PANELS[panel])
    threads = Divided(config, {2: DEATHS["after a pass"], **HALF_DONE[faults]})
    threads.check(folders["qwen3-moe"], 2, (0, 1, 4, 5))


@pytest.mark.parametrize("panel", PANELS)
def test_a_rank_is_late_behind_a_pass(folders: dict[str, str], panel: str) -> None:
    config = make_config(folders["qwen3-moe"], **DIVIDED, **PANELS[panel])
    threads = Divided(config, {2: DEATHS["before a pass"], 5: late})
    threads.check(folders["qwen3-moe"], 2, (0, 1, 4, 5))


@pytest.mark.parametrize("panel", PANELS)
def test_two_replicas_die(folders: dict[str, str], panel: str) -> None:
    config = make_config(folders["qwen3-moe"], **ROOM_FOR_ONE, **PANELS[panel])
    plants = {3: DEATHS["in a layer"], 4: lambda each: vars(Trap(expert_of(each), "_move_layer", 2, die))}
    threads = Divided(config, plants)
    assert threads.controller.survivors.least_replicas == 1
    threads.check(folders["qwen3-moe"], 1, (0, 1))


@pytest.mark.parametrize("panel", PANELS)
def test_drafts(folders: dict[str, str], panel: str) -> None:
    config = make_config(folders["qwen3-moe"], **DIVIDED, **CHAINS, **PANELS[panel])
    Divided(config, {3: DEATHS["in a layer"]}).check(folders["qwen3-moe"], 2, (0, 1, 4, 5))


@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_process_of_a_replica_is_killed(folders: dict[str, str], capfd: Any, part: int) -> None:
    """SIGKILL: no process of its replica is left, and no other one waits for the time limit."""
    config = make_config(folders["qwen3-moe"], **DIVIDED)
    assembly = assemble_in_step(config, time_limit := 200.0)
    controller: Any = assembly.scheduler
    first = psutil.Process(controller.replicas[1].process.pid)
    replica = [first, *(each for each in first.children() if "spawn_main" in " ".join(each.cmdline()))]
    assert len(replica) == 2
    killer = threading.Timer(0.05, os.kill, (replica[part].pid, signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    found, errors = run_all(controller)
    killer.join()
    again, more = run_all(controller)
    assert time.monotonic() - start < time_limit / 2, "a rank has waited for the time limit"
    check_answers(folders["qwen3-moe"], found, errors)
    check_answers(folders["qwen3-moe"], again, more)
    assert controller.num_replicas == 2
    psutil.wait_procs(replica, timeout=5)
    assert not any(each.is_running() for each in replica)
    assert "replica 1 died; its experts are with 0 and 2" in capfd.readouterr().err


def _counts_in_its_group(self: DispatchInStep) -> None:
    """The number of a rank's experts is that of its replica."""
    self.part = self.ranks.rank


def _repeats_alone(self: Survivors, run: Any, take_part: Any, num_passes: int) -> Any:
    """A rank that has completed the pass does not wait for the others of its replica."""
    tp, self.tp = self.tp, None
    try:
        return TO_THE_END(self, run, take_part, num_passes)
    finally:
        self.tp = tp


TO_THE_END = Survivors.to_the_end
BUGS = Bugs("elastic replicas of several ranks", finder="answers of one rank, or an error")
BUGS.add_all(_counts_in_its_group, where=DispatchInStep.have_regrouped)
BUGS.add_all(_repeats_alone, where=TO_THE_END)


@BUGS.found_by(AssertionError, RuntimeError, honest=True)
def test_a_planted_bug_changes_the_answers(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug.plant_in(monkeypatch)
    monkeypatch.setattr("diptych.shared.parallel.survivors.CALL_SECONDS", 1.0)
    plants = {2: DEATHS["after a pass"], 5: fails_at("broadcast", 4, 1)}
    threads = Divided(make_config(folders["qwen3-moe"], **DIVIDED), plants, seconds=2.0)
    threads.check(folders["qwen3-moe"], 2, (0, 1, 4, 5))
