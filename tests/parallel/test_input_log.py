"""Calls of the scheduler as messages between ranks."""

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.processes import input_log
from diptych.shared.engine.processes.input_log import Call, CallClock, apply, decode, encode
from diptych.shared.engine.processes.ranks import LeadScheduler
from diptych.shared.parallel import channel
from diptych.shared.types import SamplingParams
from tests.parallel.tiny_ranks import make_config, requests
from tests.planted import Bug, Bugs


def test_a_call_comes_back() -> None:
    call = Call("abort", 1.5, rid="a")
    assert decode(encode(call)) == call


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: encode(Call("abort", 2**70)), "at most 64 bits"),
        (lambda: decode(msgspec.msgpack.encode({"method": "unknown", "now": 0.0})), "Invalid enum value"),
    ],
)
def test_what_is_no_call_is_refused(call, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()


class Scheduler:
    """Returns the name of the method that is called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: name


def test_each_call_of_the_first_rank_is_sent_and_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _other_end = channel.pair()
    sent: list[bytes] = []
    follower = SimpleNamespace(call=sent.append, pipe=pipe)
    tp, assembly = SimpleNamespace(is_broken=False, grid=None), object()
    lead = LeadScheduler(Scheduler(), None, [follower], CallClock(), tp)
    calls = {"abort": ("a",), "retract": ("b",), "step": (), "flush_cache": ()}
    assert [getattr(lead, name)(*args) for name, args in calls.items()] == list(calls)
    found = [decode(data) for data in sent]
    assert [(call.method, call.rid) for call in found] == [(n, *(a or ("",))) for n, a in calls.items()]
    assert found[-1].now == lead.clock.now
    assert (lead.state(), lead.stats()) == ("state", "stats")  # of rank 0 alone
    with pytest.raises(ValueError, match="custom logit processors do not work with tp > 1 or pp > 1"):
        lead.add_request(SimpleNamespace(logit_processor=print))
    params = SamplingParams(stop_regex="a")
    with pytest.raises(ValueError, match="stop_regex does not work with tp > 1 or pp > 1: its time limit"):
        lead.add_request(SimpleNamespace(logit_processor=None, sampling_params=params))
    with pytest.raises(ValueError, match="only 3"):
        lead.run(choose, assembly, 3, [4])
    assert lead.run(choose, assembly, 4, [4]) == (assembly, 4)
    with pytest.raises(ValueError, match="test_input_log:choose' is no function of the engine"):
        decode(sent[-1])
    monkeypatch.setattr(input_log, "PACKAGE", "")
    for call in map(decode, sent[-2:]):  # on another rank, which does not end by what rank 0 raises
        made.clear()
        apply(call, Scheduler(), None, assembly)
        assert made == [call.arguments[0]]


made: list[int] = []


def choose(assembly: Any, number: int, allowed: list[int]) -> tuple[Any, int]:
    made.append(number)
    if number not in allowed:
        raise ValueError(f"only {number}")
    return assembly, number


def finished_on_two_ranks(folder: str, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[Any, list[int]]]]:
    """How the requests end on rank 0, and on a rank that repeats its calls. One runs, and one waits too long:
    the clock of rank 0 jumps."""
    flags = {"max_running_requests": 1, "waiting_timeout": 30.0}
    sent: list[bytes] = []
    pipe, _other_end = channel.pair()
    now = [time.monotonic()]
    monkeypatch.setattr(
        "diptych.shared.engine.processes.ranks.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    clock, tp = CallClock(), SimpleNamespace(is_broken=False, grid=None)
    assembly = assemble(make_config(folder, **flags), clock)
    lead = LeadScheduler(
        assembly.scheduler, assembly.grammars, [SimpleNamespace(call=sent.append, pipe=pipe)], clock, tp
    )
    reqs = requests()[:2]
    for req in reqs:
        lead.add_request(req)
    for step in range(4):
        now[0] += 100.0 * (step == 2)
        lead.step()

    clock = CallClock()
    follower, repeated = assemble(make_config(folder, **flags), clock), []
    for call in map(decode, sent):
        clock.follow(call)
        repeated.append(apply(call, follower.scheduler, follower.grammars))
    return [[(req.finished_reason, req.output_ids) for req in each if req] for each in (reqs, repeated)]


BUGS = Bugs("clock of ranks", f"{CallClock.__module__}.CallClock.follow", "ends on the first rank")
BUGS.add("a rank takes its own time", lambda self, call: setattr(self, "now", time.monotonic()))


@BUGS.found_by(honest=True)
def test_a_rank_takes_the_time_of_the_first(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    bug.plant_in(monkeypatch)
    first, other = finished_on_two_ranks(folders["llama"], monkeypatch)
    assert first[1][0] is not None, "the request that waits is overdue"
    return other != first
