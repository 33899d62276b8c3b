"""Replicas that go on without one that has died: what is slow, late or missing while they regroup."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.reference.parallel.collectives import Collectives
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.processes.replicas_in_step import ScheduleInStep
from diptych.shared.interfaces import collectives as interface
from diptych.shared.parallel.alone import ALONE
from tests.parallel.elastic_threads import Plant, Trap, in_threads
from tests.parallel.test_dp_attention import PANELS
from tests.parallel.test_elastic_ep import (
    DEATHS,
    ELASTIC,
    MORE_DEATHS,
    ROOM_FOR_ONE,
    check_answers,
    dispatch_of,
    expert_of,
    run_all,
)
from tests.parallel.tiny_ranks import make_config


def fail() -> None:
    raise RuntimeError("the time is over")


def fail_within(each: ScheduleInStep) -> None:
    """The others wait in the first collective, which ends for them with the group of this one."""

    def end() -> None:
        each.dp.leave()
        fail()

    vars(Trap(each.dp, "rejoin", 1, end, after=True))


FAULTS: dict[str, Plant] = {
    "meets the others and does not join": lambda each: vars(Trap(each.dp, "rejoin", 1, fail)),
    "joins and does not know": fail_within,
}


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_slow_rank_joins_again(
    folders: dict[str, str], panel: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank dies while the group forms, so there is no other list to wait for."""
    monkeypatch.setattr("diptych.shared.parallel.survivors.CONNECT_SECONDS", 0.5)
    config = make_config(folders["qwen3-moe"], **ELASTIC, **PANELS[panel])
    controller, schedulers = in_threads(config, {1: DEATHS["in a layer"], 2: FAULTS[fault]})
    check_answers(folders["qwen3-moe"], *run_all(controller))
    assert controller.num_replicas == 2
    assert dispatch_of(schedulers[2]).ranks.size == 2


def test_a_line_names_all_who_have_died(folders: dict[str, str], capfd: Any) -> None:
    """Also those that other ranks have gone on without, before an attempt failed."""
    config = make_config(folders["qwen3-moe"], **ROOM_FOR_ONE)
    run_all(in_threads(config, MORE_DEATHS["one while it takes over experts"])[0])
    assert "replica 1 and 2 died; its experts are with 0: " in capfd.readouterr().err


def test_room_is_known_while_experts_move(folders: dict[str, str]) -> None:
    """The controller asks from another thread."""
    controller, schedulers = in_threads(make_config(folders["qwen3-moe"], **ELASTIC), {})
    experts = expert_of(schedulers[0])
    few = experts.experts.physical_to_logical[:, :6]
    experts.experts = experts.experts._replace(physical_to_logical=few)  # of 2 ranks, before `ep` is 2
    assert controller.survivors.least_replicas == 2


class WithoutLeave(Collectives):
    leave = interface.Collectives.leave


class WithoutRejoin(Collectives):
    rejoin = interface.Collectives.rejoin


@pytest.mark.parametrize("missing", ["leave", "rejoin"])
def test_collectives_that_cannot_leave_are_refused(missing: str, folders: dict[str, str]) -> None:
    own = f"{__name__}:Without{missing.title()}"
    config = make_config(folders["qwen3-moe"], **ELASTIC).updated(use={"collectives": own})
    with pytest.raises(ValueError, match=f"can leave and rejoin; Without{missing.title()} lacks one"):
        assemble(config, tp=ALONE)
