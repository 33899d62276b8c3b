"""Prefill and decode in two engines: the answers of one, and no page lost whatever ends when."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from diptych.reference.parallel.disaggregation import (
    DecodeSide,
    Failed,
    OnePrefillEngine,
    PrefillSide,
    _encode,
)
from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.llm import LLM
from diptych.shared.engine.processes.child import Child
from diptych.shared.engine.processes.disaggregated import transport_of
from diptych.shared.scheduling.invariants import check_idle
from diptych.shared.tools.conformance.contracts.transport.transfers import Pool
from diptych.shared.types import (
    FinishAbort,
    FinishError,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SamplingParams,
)
from tests.parallel.tiny_ranks import answers, make_config, requests

SECONDS = 20.0
TRANSPORTS = ["reference", "shared_memory"]


class Pair:
    """Both engines in this process. `hold()` keeps the transport from reading the pages of the sender."""

    def __init__(self, config: EngineConfig, **flags_of_prefill: Any) -> None:
        config = config.updated(check_invariants=False, disaggregation=True)
        transport_class = transport_of(config)
        self.prefill, self.decode = assemble(config.updated(**flags_of_prefill)), assemble(config)
        self.gate, self.is_copying = threading.Event(), threading.Event()
        self.gate.set()
        pool = self.prefill.kv_pool
        k_buffer = pool.k_buffer

        def gated(layer_id: int) -> Any:
            if threading.current_thread() is self.sender._writer:
                self.is_copying.set()
                self.gate.wait(SECONDS)
            return k_buffer(layer_id)

        with ThreadPoolExecutor(2) as threads:
            sender, receiver = threads.map(transport_class, socket.socketpair(), (pool, self.decode.kv_pool))
        self.sender: Any = sender
        self.receiver: Any = receiver
        pool.k_buffer = gated  # type: ignore[method-assign]
        self.prefill_side = PrefillSide(
            self.prefill.scheduler, self.prefill.parts, self.prefill.grammars, sender
        )
        decode = self.decode
        self.decode_side = DecodeSide(
            decode.scheduler,
            decode.parts,
            decode.grammars,
            decode.model_config.vocab_size,
            decode.config.context_len,
            OnePrefillEngine(receiver),
        )

    def until(self, holds: Callable[[], bool], turns: str = "both") -> None:
        """Steps of both engines, or of one."""
        limit = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < limit
            if turns != "decode":
                self.prefill_side.turn()
            if turns != "prefill":
                self.decode_side.step()

    def finish(self) -> None:
        """Run both until nothing is left. Then their pools are whole."""
        self.gate.set()
        self.until(lambda: not self.decode_side.has_work())
        self.until(
            lambda: (
                not (
                    self.prefill_side.prefill
                    or self.prefill_side.in_flight
                    or self.prefill.scheduler.has_work()
                )
            ),
            "prefill",
        )
        assert not self.decode_side.reserved
        assert not self.decode_side.scheduled
        for engine in (self.prefill, self.decode):
            check_idle(engine.parts.allocator, engine.parts.req_to_token_pool, engine.parts.tree_cache)
            assert engine.scheduler.flush_cache()
            assert engine.parts.allocator.available_size() == engine.parts.allocator.size

    def close(self) -> None:
        self.gate.set()
        self.sender.close()
        self.receiver.close()


@contextlib.contextmanager
def pair_of(config: EngineConfig, **flags_of_prefill: Any) -> Iterator[Pair]:
    pair = Pair(config, **flags_of_prefill)
    try:
        yield pair
    finally:
        pair.close()


def config_of(folders: dict[str, str], transport: str, **flags: Any) -> EngineConfig:
    model = folders[flags.pop("model", "llama")]
    return make_config(model, use={"transport": transport}, **{"page_size": 4} | flags)


def output_ids(reqs: list[Req]) -> list[list[int]]:
    return [req.output_ids for req in reqs]


def expected_of(config: EngineConfig) -> list[Req]:
    return answers(assemble(config))


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


@pytest.mark.parametrize("scheduler", ["reference", "optimized"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_no_token_of_a_prompt_is_computed_twice(
    folders: dict[str, str], scheduler: str, page_size: int
) -> None:
    config = make_config(folders["llama"], use={"scheduler": scheduler}, page_size=page_size)
    expected = expected_of(config)
    with pair_of(config) as pair:
        runner, modes = pair.decode.parts.model_runner, set()
        forward = runner.forward

        def noting(batch: ForwardBatch) -> LogitsOutput:
            modes.add(batch.forward_mode)
            return forward(batch)

        runner.forward = noting  # type: ignore[method-assign]
        reqs = requests()
        for req in reqs:
            pair.decode_side.add_request(req)
        pair.finish()
        assert modes == {ForwardMode.DECODE}
        assert output_ids(reqs) == output_ids(expected)
        for req, alone in zip(reqs, expected):
            found, wanted = (each.input_logprobs[1:] + each.output_logprobs for each in (req, alone))
            assert [one.token_id for one in found] == [one.token_id for one in wanted]
            logprobs = [one.logprob for one in wanted]
            assert [one.logprob for one in found] == pytest.approx(logprobs, abs=1e-4)
        assert [req.num_cached_tokens for req in reqs] == [0] * len(reqs)


def test_what_the_first_token_decides(folders: dict[str, str]) -> None:
    """It may end the request; stop tokens are banned in it; there may be none."""
    config = config_of(folders, "reference")
    first = expected_of(config)[0].output_ids[0]
    params: list[dict[str, Any]] = [
        {"max_new_tokens": 1},
        {"stop_token_ids": [first]},
        {"stop_token_ids": [first], "min_new_tokens": 2},
        {"max_new_tokens": 0, "logprob_start_len": 0, "return_logprob": True},
        {"logit_bias": {first: -100.0}},
    ]

    usual = {"temperature": 0.0, "max_new_tokens": 3}

    def asked() -> list[Req]:
        return [
            Req(f"a{i}", requests()[0].origin_input_ids, SamplingParams(**usual | given), seed=0)
            for i, given in enumerate(params)
        ]

    alone, apart = assemble(config), asked()
    expected = asked()
    for req in expected:
        alone.scheduler.add_request(req)
        while alone.scheduler.has_work():
            alone.scheduler.step()
    with pair_of(config) as pair:
        for req in apart:
            pair.decode_side.add_request(req)
            pair.finish()  # flushes both caches
        assert output_ids(apart) == output_ids(expected)
        assert [req.finished_reason for req in apart] == [req.finished_reason for req in expected]
        assert [len(req.input_logprobs) for req in apart] == [len(req.input_logprobs) for req in expected]


def test_a_prefill_engine_whose_memory_is_in_flight(folders: dict[str, str]) -> None:
    """The next prompt waits until the transport has read the one before."""
    with pair_of(config_of(folders, "reference"), max_total_tokens=32) as pair:
        reqs = requests()[3:]
        for req in reqs:
            pair.decode_side.add_request(req)
        pair.gate.clear()
        pair.until(pair.is_copying.is_set)
        for _ in range(5):
            pair.prefill_side.turn()
        assert len(pair.prefill_side.prefill) == 1
        pair.finish()
        assert [len(req.output_ids) for req in reqs] == [11, 11]


STATES = ["waiting", "allocated", "prefill", "copying", "scheduled"]


def bring_to(pair: Pair, state: str) -> Req:
    """A request in a state, and one before it that is running."""
    first, req = requests()[1], requests()[4]
    pair.decode_side.add_request(first)
    pair.until(lambda: first.rid in pair.decode_side.scheduled)
    pair.until(lambda: bool(first.output_ids))
    pair.decode_side.add_request(req)
    if state == "allocated":
        pair.until(lambda: bool(pair.decode_side.transfers), "decode")
    elif state == "prefill":  # one chunk of several
        pair.until(lambda: bool(pair.decode_side.transfers), "decode")
        pair.until(lambda: bool(pair.prefill_side.prefill), "prefill")
    elif state == "copying":
        pair.is_copying.clear()
        pair.gate.clear()
        pair.until(pair.is_copying.is_set)
    elif state == "scheduled":
        pair.until(lambda: bool(req.output_ids))
    return req


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
        pair.sender.post(_encode(Failed("gone", "late")))
        req = requests()[0]
        pair.decode_side.add_request(req)
        pair.finish()
        assert len(req.output_ids) == req.max_new_tokens


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 2}, "disaggregation=True does not work with tp=2"),
        ({"dp": 2}, "does not work with dp=2"),
        ({"pp": 2}, "does not work with pp=2"),
        ({"speculative": "ngram"}, "does not work with speculative=ngram"),
        ({"disable_radix_cache": True}, "does not work with disable_radix_cache=True"),
        ({"check_invariants": True}, "does not work with check_invariants=True"),
        ({"enable_priority_scheduling": True}, "does not work with enable_priority_scheduling=True"),
        ({"max_queued_requests": 3}, "does not work with max_queued_requests=3"),
        ({"waiting_timeout": 2.0}, "does not work with waiting_timeout=2.0"),
    ],
)
def test_what_cannot_run(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(disaggregation=True, **flags)


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
    from diptych.shared.engine.processes import disaggregated

    def kill(self: Any, seconds: float) -> Any:
        os.kill(self.process.pid, signal.SIGKILL)
        return NEXT_MESSAGE(self, seconds)

    monkeypatch.setattr(disaggregated.Child, "next_message", kill)
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    with pytest.raises(RuntimeError, match="prefill engine has ended with signal SIGKILL"):
        LLM("tiny-dense", disaggregation=True, use={"transport": "shared_memory"}, **flags)


NEXT_MESSAGE = Child.next_message


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


def test_pages_that_are_freed_in_flight(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: another prompt overwrites the pages before they are copied."""
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

    assert run() == expected[4].output_ids
    monkeypatch.setattr(PrefillSide, "_send", _unlocks_at_send)
    assert run() != expected[4].output_ids
