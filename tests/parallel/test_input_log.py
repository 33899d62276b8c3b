"""Calls of the scheduler as messages between ranks."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shared.engine.input_log import Call, CallClock, apply, decode, encode
from shared.engine.ranks import LeadScheduler


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


def test_each_call_of_the_first_rank_is_sent_and_made() -> None:
    pipe, _other_end = multiprocessing.Pipe()
    sent: list[bytes] = []
    follower = SimpleNamespace(call=sent.append, pipe=pipe)
    tp, assembly = SimpleNamespace(is_broken=False), SimpleNamespace(scheduler=Scheduler(), grammars=None)
    lead = LeadScheduler(assembly, [follower], CallClock(), tp)
    calls = {"abort": ("a",), "retract": ("b",), "step": (), "flush_cache": ()}
    assert [getattr(lead, name)(*args) for name, args in calls.items()] == list(calls)
    found = [decode(data) for data in sent]
    assert [(call.method, call.rid) for call in found] == [(n, *(a or ("",))) for n, a in calls.items()]
    assert found[-1].now == lead.clock.now
    with pytest.raises(ValueError, match="no custom logit processors"):
        lead.add_request(SimpleNamespace(logit_processor=print))
    with pytest.raises(ValueError, match="only 3"):
        lead.run(choose, assembly, 3, [4])
    assert lead.run(choose, assembly, 4, [4]) == (assembly, 4)
    for call in map(decode, sent[-2:]):  # on another rank, which does not end by what rank 0 raises
        made.clear()
        apply(call, Scheduler(), assembly)
        assert made == [call.arguments[0]]


made: list[int] = []


def choose(assembly: Any, number: int, allowed: list[int]) -> tuple[Any, int]:
    made.append(number)
    if number not in allowed:
        raise ValueError(f"only {number}")
    return assembly, number
