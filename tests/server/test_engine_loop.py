"""The engine's loop with a channel of the test: what an operation does to the running requests."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.server.engine.engine_loop import EngineLoop
from diptych.shared.server.engine.messages import (
    Abort,
    Control,
    FromEngine,
    Generate,
    Outputs,
    Reply,
    RequestOutput,
    ToEngine,
    decode_to_engine,
    encode,
)
from diptych.shared.types import SamplingParams


class Script:
    """A channel: messages to the engine, and what it sent."""

    def __init__(self) -> None:
        self.waiting: deque[ToEngine] = deque()
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> ToEngine | None:
        return self.waiting.popleft() if self.waiting else None

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


class Driver:
    """Steps of a loop, one by one."""

    def __init__(self, loop: EngineLoop, script: Script) -> None:
        self.loop, self.script = loop, script

    def step(self, *messages: ToEngine) -> list[RequestOutput]:
        """Give these messages; the outputs of the step that follows."""
        self.script.waiting.extend(messages)
        self.script.sent.clear()
        self.loop._read_messages()
        self.loop._step()
        sent = [message for message in self.script.sent if isinstance(message, Outputs)]
        return [output for message in sent for output in message.outputs]

    def control(self, action: str, **args: Any) -> Reply:
        self.step(Control(call_id=1, action=action, args=args))
        return next(message for message in self.script.sent if isinstance(message, Reply))

    def generate(self, *rids: str) -> None:
        params = SamplingParams(max_new_tokens=50, ignore_eos=True)
        self.step(*(Generate(rid=rid, input_ids=[5, 6, 7], params=params, seed=1) for rid in rids))


@pytest.fixture
def driver() -> Driver:
    llm = LLM("tiny-dense", device="cpu", max_total_tokens=600, max_loras_per_batch=1)
    script = Script()
    return Driver(EngineLoop(llm.assembly, script), script)


def test_an_engine_that_is_stopped_writes_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(
        "tiny-dense", device="cpu", hicache_tokens=256, hicache_dir=str(tmp_path),
        use={"disk_tier": "optimized"},
    )  # fmt: skip
    tree_cache: Any = llm.assembly.parts.tree_cache
    tier = tree_cache.host.disk.tier
    write, may_write = tier._write, Event()
    monkeypatch.setattr(tier, "_write", lambda *given: may_write.wait(30) and write(*given))

    class UntilAnswered(Script):
        def receive(self, timeout: float) -> ToEngine | None:
            if any(isinstance(message, Outputs) for message in self.sent):
                Timer(0.3, may_write.set).start()
                return Control(call_id=1, action="stop", args={})
            return super().receive(timeout)

    script = UntilAnswered()
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    script.waiting.append(Generate(rid="a", input_ids=[5] * 80, params=params, seed=1))
    EngineLoop(llm.assembly, script).run()
    assert len(list(tmp_path.glob("*.kv"))) == 5


@pytest.mark.parametrize("error", [OSError("no"), KeyError("a"), MemoryError()], ids=repr)
def test_an_adapter_that_fails_ends_no_request(
    driver: Driver, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    driver.generate("a")
    monkeypatch.setattr("diptych.shared.engine.requests.lora_adapters.read_adapter", fail)
    reply = driver.control("load_lora", name="mine", path="somewhere")
    assert reply.error is not None
    assert reply.error.startswith("adapter 'mine' cannot be loaded: ")
    assert [output.rid for output in driver.step()] == ["a"]


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("CUDA out of memory")], ids=repr)
def test_images_that_cannot_be_read_end_their_request_only(
    driver: Driver, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    driver.generate("a")
    monkeypatch.setattr("diptych.shared.server.engine.engine_loop.received_images", fail)
    params = SamplingParams(max_new_tokens=2)
    outputs = driver.step(Generate(rid="b", input_ids=[5], params=params, seed=1, images=[b"1"]))
    (ended,) = (output for output in outputs if output.rid == "b")
    assert ended.finish is not None
    assert (ended.finish.status, str(error) in str(ended.finish.message)) == (500, True)
    assert "a" in [output.rid for output in driver.step()]


def test_an_abort_ends_a_request_of_a_paused_engine(driver: Driver) -> None:
    driver.generate("a", "b", "c")
    driver.control("pause")
    (ended,) = driver.step(Abort(rids=["a"]))
    assert (ended.rid, ended.finish and ended.finish.kind) == ("a", "abort")
    assert driver.step() == []
    assert driver.control("abort_all").result == {"num_aborted": 2}
    ends = [
        output.rid
        for message in driver.script.sent
        if isinstance(message, Outputs)
        for output in message.outputs
    ]
    assert sorted(ends) == ["b", "c"]
    assert driver.control("continue").result == {}
    assert driver.step() == []  # each end is reported once
    assert not driver.loop.scheduler.has_work()


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [({"dp": 2}, True), ({"disaggregation": True}, True), ({"dp": 2, "dp_attention": True}, False)],
    ids=str,
)
def test_engines_of_several_processes_refuse_a_pause(
    driver: Driver, flags: dict[str, Any], is_refused: bool
) -> None:
    config: Any = EngineConfig(**flags)
    driver.loop.assembly = replace(driver.loop.assembly, config=config)
    error = driver.control("pause").error
    assert (
        error is not None and f"{next(iter(flags))}={next(iter(flags.values()))} cannot pause" in error
    ) == is_refused
    assert driver.loop.is_paused != is_refused


def test_the_others_go_on_after_a_pause(driver: Driver) -> None:
    driver.generate("a", "b")
    driver.control("pause")
    driver.step(Abort(rids=["a"]))
    driver.control("continue")
    outputs = driver.step()
    assert [output.rid for output in outputs] == ["b"]
    assert driver.control("pause", mode="abort").result == {}
    assert not driver.loop._live


def test_parameters_that_are_refused_on_arrival_end_their_request_only(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check with a time limit may come to another verdict than in the API."""

    def refuse(patterns: Any) -> None:
        raise ValueError("stop_regex matches the empty text")

    params = SamplingParams(max_new_tokens=2, stop_regex="x")
    data = encode(Generate(rid="b", input_ids=[5], params=params, seed=1))
    driver.generate("a")
    monkeypatch.setattr("diptych.shared.types.sampling_params.check_stop_regexes", refuse)
    outputs = driver.step(decode_to_engine(data))  # type: ignore[arg-type]
    (ended,) = (output for output in outputs if output.rid == "b")
    assert ended.finish is not None
    assert (ended.finish.status, "matches the empty text" in ended.finish.message) == (400, True)
    assert [output.rid for output in driver.step()] == ["a"]
