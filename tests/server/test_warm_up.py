"""Requests before the first one, and the check of all pools after the last one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.scheduling.invariants import InvariantViolation
from diptych.shared.server.engine.engine_loop import EngineLoop
from diptych.shared.server.engine.warm_up import PARAMS, warm_up
from diptych.shared.types import SampleOutput, SamplingParams

GREEDY = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    return LLM("tiny-dense", device="cpu", panel="reference", max_total_tokens=600, check_idle=True)


def test_warm_up_runs_every_kind_of_sampling_and_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos: list[Any] = []
    sampler = llm.assembly.parts.sampler
    sample = sampler.sample

    def watched(logits: Any, info: Any, positions: Any) -> SampleOutput:
        infos.append(info)
        return sample(logits, info, positions)

    monkeypatch.setattr(sampler, "sample", watched)
    warm_up(llm.scheduler, 600, llm.assembly.parts.num_token_ids)
    kinds = {(i.is_all_greedy, i.needs_filter, i.return_logprob, i.output_counts is not None) for i in infos}
    assert len(kinds) == len(PARAMS)
    assert not llm.scheduler.has_work()
    assert llm.scheduler.stats().num_used_tokens == 0


def test_a_failure_ends_the_start(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(llm.assembly.parts.sampler, "sample", broken)
    with pytest.raises(RuntimeError, match="a warm-up request failed: ValueError: no such kernel"):
        warm_up(llm.scheduler, 600, llm.assembly.parts.num_token_ids)


@pytest.mark.parametrize(
    ("device", "skip", "is_warm"), [("cuda", False, 1), ("cuda", True, 0), ("cpu", False, 0)]
)
def test_only_a_gpu_needs_it(
    llm: LLM, device: str, skip: bool, is_warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("diptych.shared.server.engine.engine_loop.warm_up", lambda *args: calls.append(args))
    config = llm.config.updated(device=device, skip_warmup=skip)
    loop = EngineLoop(replace(llm.assembly, config=config), channel=_NoMessages())
    loop.on_stop()
    loop.run()
    assert len(calls) == is_warm


class _NoMessages:
    def receive(self, timeout: float) -> None:
        return None

    def send(self, message: Any) -> None:
        pass


def test_a_leak_is_found_when_the_last_request_ends(llm: LLM) -> None:
    llm.generate("one two three", GREEDY, progress=False)
    llm.assembly.parts.allocator.alloc(1)
    with pytest.raises(InvariantViolation):
        llm.generate("one two three", GREEDY, progress=False)
