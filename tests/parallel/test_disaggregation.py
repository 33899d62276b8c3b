"""Prefill and decode in two engines: the answers of one, and no page lost whatever ends when."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from diptych.reference.parallel.disaggregation import DecodeSide, PrefillSide
from diptych.reference.parallel.prompt_messages import Failed, encode
from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.engine.processes.child import Child
from diptych.shared.tools.conformance.contracts.transport.transfers import Pool
from diptych.shared.types import FinishAbort, FinishError, Req
from tests.parallel.engine_pair import SECONDS, STATES, bring_to, config_of, expected_of, output_ids, pair_of
from tests.parallel.tiny_ranks import requests
from tests.planted import Bug, Bugs

TRANSPORTS = ["reference", "shared_memory"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 1},
        {"page_size": 4, "chunked_prefill_size": 8},
        {"page_size": 4, "max_total_tokens": 64},
        {"page_size": 4, "enable_mixed_chunk": True},
        {"model": "deepseek-v2-lite"},
    ],
    ids=["page 1", "chunks", "small pool", "mixed chunks", "latent rows"],
)
def test_two_engines_answer_as_one(folders: dict[str, str], transport: str, flags: dict[str, Any]) -> None:
    config = config_of(folders, transport, **flags)
    expected = expected_of(config)
    with pair_of(config) as pair:
        for _ in range(2):  # the second time the decode engine has most prompts
            reqs = requests()
            for req in reqs:
                pair.decode_side.add_request(req)
            pair.until(lambda: not pair.decode_side.has_work())
            assert output_ids(reqs) == output_ids(expected)
            for req, alone in zip(reqs, expected):
                assert req.finished_reason == alone.finished_reason
                for found, wanted in zip(req.input_logprobs, alone.input_logprobs):
                    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        pair.finish()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_ends(folders: dict[str, str], transport: str, state: str, side: str) -> None:
    """As if its process were killed: running requests go on, others get an error, and no page is lost."""
    config = config_of(folders, transport, chunked_prefill_size=8)
    expected = expected_of(config)
    with pair_of(config) as pair:
        req = bring_to(pair, state)
        end = pair.sender if side == "prefill" else pair.receiver
        end.connection.shutdown(socket.SHUT_RDWR)
        time.sleep(0.02)
        pair.gate.set()
        pair.until(lambda: pair.sender.is_lost and pair.receiver.is_lost)
        pair.finish()
        if state == "scheduled":
            assert req.output_ids == expected[4].output_ids
        else:
            assert isinstance(req.finished_reason, FinishError)
            assert "the prefill engine has ended" in str(req.finished_reason)
        assert pair.prefill_side.is_done
        late = requests()[3]
        pair.decode_side.add_request(late)
        outputs = [output for _ in range(3) for output in pair.decode_side.step()]
        assert [output.finished_reason for output in outputs] == [late.finished_reason]
        pair.finish()
        assert isinstance(late.finished_reason, FinishError)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("state", STATES)
def test_a_request_is_aborted(folders: dict[str, str], transport: str, state: str) -> None:
    config = config_of(folders, transport, chunked_prefill_size=8)
    expected = expected_of(config)
    with pair_of(config) as pair:
        req = bring_to(pair, state)
        assert pair.decode_side.abort(req.rid)
        assert not pair.decode_side.abort("unknown")
        if state == "copying":
            for _ in range(5):
                pair.decode_side.step()
            assert pair.decode_side.transfers  # its pages stay
            assert isinstance(req.finished_reason, FinishAbort)
            pair.gate.set()
        pair.decode_side.step()  # reports the end: then the id is free
        again = requests()[4]
        pair.decode_side.add_request(again)
        pair.finish()
        assert isinstance(req.finished_reason, FinishAbort)
        assert again.output_ids == expected[4].output_ids


def test_a_prompt_that_fails(folders: dict[str, str]) -> None:
    config = config_of(folders, "reference")
    with pair_of(config) as pair:
        forward = pair.prefill.model.forward
        pair.prefill.model.forward = lambda *args: 1 / 0  # type: ignore[method-assign]
        req = requests()[2]
        pair.decode_side.add_request(req)
        pair.until(lambda: req.finished_reason is not None)
        assert "ZeroDivisionError" in str(req.finished_reason)
        pair.prefill.model.forward = forward  # type: ignore[method-assign]
        pair.finish()


def test_a_request_waits_until_its_longest_answer_fits(folders: dict[str, str]) -> None:
    """It counts as waiting until its prompt has come, unless it is aborted."""
    with pair_of(config_of(folders, "reference", max_total_tokens=56)) as pair:
        first, second = requests()[3:]
        assert first.num_tokens + second.num_tokens + 2 * first.max_new_tokens > 56
        for req in (first, second):
            pair.decode_side.add_request(req)
        pair.decode_side.step()
        assert [transfer.req for transfer in pair.decode_side.transfers.values()] == [first]
        assert pair.decode_side.waiting == [second]
        assert {req.rid for req in pair.decode_side.state().waiting_queue} == {first.rid, second.rid}
        assert pair.decode_side.stats().num_waiting == 2
        pair.decode_side.abort(first.rid)
        assert pair.decode_side.state().waiting_queue == [second]
        pair.finish()
        assert len(second.output_ids) == second.max_new_tokens
        assert pair.decode_side.state().waiting_queue == []


HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder")
OVERLAP = dict.fromkeys(HOST_PARTS, "optimized")


@pytest.mark.parametrize("overlaps", [False, True])
def test_when_a_prompt_is_asked_for(
    folders: dict[str, str], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once; but where a batch in flight may write to memory that is free, behind the step that ends it."""
    use = {"transport": "reference", **OVERLAP}
    config = config_of(folders, "reference").updated(use=use, disable_overlap_schedule=not overlaps)
    with pair_of(config) as pair:
        order: list[str] = []
        step, post, wait = pair.decode.scheduler.step, pair.receiver.post, time.sleep
        called = {"step": (pair.decode.scheduler, step), "post": (pair.receiver, post), "sleep": (time, wait)}
        for name, (owner, function) in called.items():

            def noted(*args: Any, name: str = name, function: Any = function) -> Any:
                order.append(name)
                return function(*args)

            monkeypatch.setattr(owner, name, noted)
        first, second = requests()[3:]
        pair.add(first)
        pair.decode_side.step()
        assert order[:2] == ["post", "sleep"]
        pair.until(lambda: len(first.output_ids) == 2)
        order.clear()
        pair.add(second)
        pair.decode_side.step()
        assert [name for name in order if name != "sleep"] == (
            ["step", "post"] if overlaps else ["post", "step"]
        )
        monkeypatch.undo()
        pair.finish()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_interrupt_between_a_room_and_its_prompt(
    folders: dict[str, str], is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folders, "reference").updated(use={"transport": "reference", **OVERLAP})
    expected = expected_of(config)
    with pair_of(config) as pair:
        first, second = requests()[3:]
        pair.add(first)
        pair.until(lambda: len(first.output_ids) == 2)
        pair.add(second)
        monkeypatch.setattr(pair.decode.scheduler, "step", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.decode_side.step()
        monkeypatch.undo()
        assert pair.decode_side.transfers
        if is_aborted:
            assert pair.decode_side.abort(second.rid)
        pair.finish()
        assert first.output_ids == expected[3].output_ids
        assert is_aborted or second.output_ids == expected[4].output_ids


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_the_prefill_engine_is_done_when_it_is_alone_and_idle(folders: dict[str, str]) -> None:
    with pair_of(config_of(folders, "reference")) as pair:
        assert not pair.prefill_side.is_done  # the other engine may ask
        pair.prefill.scheduler.add_request(requests()[0])
        pair.receiver.connection.shutdown(socket.SHUT_RDWR)
        pair.until(lambda: pair.sender.is_lost, "decode")
        assert not pair.prefill_side.is_done
        pair.until(lambda: pair.prefill_side.is_done, "prefill")


def test_a_reason_that_comes_after_the_end_of_its_room(folders: dict[str, str]) -> None:
    with pair_of(config_of(folders, "reference")) as pair:
        pair.sender.post(encode(Failed("gone", "late")))
        req = requests()[0]
        pair.decode_side.add_request(req)
        pair.finish()
        assert len(req.output_ids) == req.max_new_tokens


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 2}, "disaggregation=True does not work with tp=2: KV comes over one connection"),
        ({"dp": 2}, "does not work with dp=2"),
        ({"pp": 2}, "does not work with pp=2"),
        ({"disable_radix_cache": True}, "does not work with disable_radix_cache=True"),
        ({"check_invariants": True}, "does not work with check_invariants=True"),
        ({"enable_priority_scheduling": True}, "does not work with enable_priority_scheduling=True"),
        ({"max_queued_requests": 3}, "does not work with max_queued_requests=3"),
        ({"waiting_timeout": 2.0}, "does not work with waiting_timeout=2.0"),
        (
            {"num_continuous_decode_steps": 2},
            "num_continuous_decode_steps=2 does not work with disaggregation=True",
        ),
        (
            {"num_continuous_decode_steps": 2, "disaggregation": False, "disaggregation_mode": "decode"},
            "num_continuous_decode_steps=2 does not work with disaggregation_mode=decode",
        ),
    ],
)
def test_what_cannot_run(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"disaggregation": True} | flags)


@pytest.mark.parametrize("transport", [pytest.param("reference", marks=pytest.mark.full), "shared_memory"])
def test_processes(transport: str) -> None:
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    sampling = {"temperature": 0, "max_tokens": 16, "progress": False}
    prompts = ["Count from 3 to 9.", "What is 12 + 30?"]
    expected = [output.text for output in LLM("tiny-dense", **flags).generate(prompts, **sampling)]
    llm = LLM("tiny-dense", disaggregation=True, use={"transport": transport}, **flags)
    assert [output.text for output in llm.generate(prompts, **sampling)] == expected
    assert isinstance(llm.scheduler, DecodeSide)
    assert llm.flush_cache()
    child = llm.scheduler.child
    os.kill(child.process.pid, signal.SIGKILL)
    output = llm.generate("What is 4 + 5?", **sampling)
    assert output.finish_reason == FinishError("the prefill engine has ended", 503)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def test_a_prefill_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed at once, before it can be ready."""
    from diptych.shared.engine.processes import disaggregated

    def spawn_and_kill(*args: Any, **options: Any) -> Child:
        child = spawn(*args, **options)
        os.kill(child.process.pid, signal.SIGKILL)
        return child

    spawn = disaggregated.Child.spawn
    monkeypatch.setattr(disaggregated.Child, "spawn", spawn_and_kill)
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    with pytest.raises(RuntimeError, match="prefill engine has ended with signal SIGKILL"):
        LLM("tiny-dense", disaggregation=True, use={"transport": "shared_memory"}, **flags)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_ends_whose_pages_differ_close_the_connection(name: str) -> None:
    pools = [Pool(page_size, torch.float32, 0) for page_size in (1, 4)]
    ends = socket.socketpair()
    with ThreadPoolExecutor(2) as threads:
        found = list(map(threads.submit, [registry.load("transport", name)] * 2, ends, pools))
        assert all(isinstance(one.exception(SECONDS), ValueError) for one in found)
    assert [end.fileno() for end in ends] == [-1, -1]


def _unlocks_at_send(self: PrefillSide, *arguments: Any) -> None:
    """The prompt may be evicted while the transport reads it."""
    SEND(self, *arguments)
    for sent in self.in_flight.values():
        if sent.node is not None:
            self.tree.dec_lock_ref(sent.node)
            sent.node = None


SEND = PrefillSide._send


BUGS = Bugs("pages in flight", f"{PrefillSide.__module__}.PrefillSide._send", "answers of one engine")
BUGS.add_all(_unlocks_at_send)


@BUGS.found_by(honest=True)
def test_pages_that_are_freed_in_flight(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Another prompt overwrites the pages before they are copied."""
    bug.plant_in(monkeypatch)
    config = config_of(folders, "reference", max_total_tokens=32, page_size=1)
    expected = expected_of(config)

    def run() -> list[int]:
        with pair_of(config) as pair:
            req = requests()[4]
            pair.decode_side.add_request(req)
            pair.gate.clear()
            pair.until(pair.is_copying.is_set)
            others = [Req(f"o{i}", [i + 50] * 20, req.sampling_params, seed=0) for i in range(3)]
            for other in others:  # prompts that the prefill engine computes meanwhile
                pair.prefill.scheduler.add_request(other)
            for _ in range(5):
                pair.prefill.scheduler.step()
            for other in others:
                pair.prefill.scheduler.abort(other.rid)
            pair.finish()
            return req.output_ids

    return run() != expected[4].output_ids
