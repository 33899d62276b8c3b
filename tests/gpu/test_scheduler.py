"""The overlap scheduler on a GPU: streams, no synchronization in a step, same answers as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from diptych.optimized.overlap.streams import CudaStreams, Pending, Streams, Work
from diptych.optimized.scheduler import Scheduler
from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.whole_engine.switches import GREEDY, expect_answers, prompts
from diptych.shared.types import SamplingParams
from tests.dispatch_recorder import DispatchRecord

from .harness import CYCLES_PER_SECOND, MODELS, OPTIMIZED, name_of, optimized, reference, reference_answers

pytestmark = pytest.mark.gpu

USE = {"scheduler": "optimized", "memory_pool": "optimized", "attention": "triton"}
"""Triton attention accepts float32; the reference pools would synchronize."""


def test_results_without_elements_arrive() -> None:
    """Page-locked memory of no bytes does not exist."""
    device = torch.device("cuda")
    full, empty = (
        CudaStreams(device)
        .launch(lambda: (torch.ones(2, device=device), torch.empty(0, 3, device=device)))
        .wait()
    )
    assert (full.tolist(), empty.shape, empty.device.type) == ([1.0, 1.0], (0, 3), "cpu")


FLAGS: tuple[dict[str, Any], ...] = (
    {},
    {"disable_cuda_graph": True},
    {"page_size": 16, "chunked_prefill_size": 64},
    {"chunked_prefill_size": 7, "enable_mixed_chunk": True, "max_running_requests": 4},
    {"disable_radix_cache": True, "page_size": 4},
    {"max_total_tokens": 256, "schedule_conservativeness": 0.01, "page_size": 16},  # retraction
)

SAMPLED = SamplingParams(
    max_new_tokens=24, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True, frequency_penalty=0.7,
    return_logprob=True, top_logprobs_num=2, logprob_start_len=0,
)  # fmt: skip


def overlapped(model: str, **flags: Any) -> LLM:
    return optimized(model, use=USE, **flags)


def scheduler_of(llm: LLM) -> Scheduler:
    scheduler = llm.scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler


@pytest.mark.parametrize("flags", FLAGS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_float32_answers_are_the_references(model: str, flags: dict[str, Any]) -> None:
    expected = [output.output_ids for output in reference_answers(model)]
    expect_answers(model, expected, **{**OPTIMIZED, "use": USE, **flags})


@pytest.mark.parametrize("model", MODELS)
def test_what_requests_ask_of_the_sampler_is_the_references(model: str) -> None:
    """Penalties count the token in flight; log-probabilities belong to the right request."""
    engines = reference(model, dtype="float32"), overlapped(model, dtype="float32", chunked_prefill_size=32)
    answers = [llm.generate(prompts(llm), SAMPLED, progress=False) for llm in engines]
    for expected, found in zip(*answers):
        assert found.output_ids == expected.output_ids
        for name in ("output_logprobs", "input_logprobs"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
            # Kernels sum in another order; a log-probability of another token differs by far more.
            for a, b in zip(ours, theirs):
                assert (a.logprob is None) == (b.logprob is None)
                assert a.logprob is None or abs(a.logprob - b.logprob) < 1e-3


def test_models_run_on_a_stream_of_their_own() -> None:
    llm = overlapped("tiny-dense", disable_cuda_graph=True)
    streams = scheduler_of(llm).pipeline.streams
    assert isinstance(streams, CudaStreams)
    seen: list[tuple[str, int]] = []
    runner, process = llm.assembly.parts.model_runner, scheduler_of(llm).process_batch_result

    def watched_forward(*args: Any) -> Any:
        seen.append(("forward", torch.cuda.current_stream().cuda_stream))
        return type(runner).forward_and_sample(runner, *args)

    def watched_process(*args: Any) -> None:
        seen.append(("process", torch.cuda.current_stream().cuda_stream))
        process(*args)

    runner.forward_and_sample = watched_forward  # type: ignore[method-assign]
    scheduler_of(llm).process_batch_result = watched_process  # type: ignore[method-assign]
    llm.generate("one two", GREEDY, progress=False)
    forward = streams.forward_stream.cuda_stream
    assert {stream for what, stream in seen if what == "forward"} == {forward}
    assert {stream for what, stream in seen if what == "process"} == {torch.cuda.current_stream().cuda_stream}
    assert seen[0][0] == seen[1][0] == "forward", "the second batch was launched late"


class Checked(CudaStreams):
    """Another scheduler's streams, where any synchronization with the GPU during a launch raises.

    They are the same streams: on new ones a batch would not wait for the launches in flight.
    """

    def __init__(self, streams: Streams) -> None:
        assert isinstance(streams, CudaStreams)
        super().__init__(streams.device)
        self.forward_stream, self.copy_stream = streams.forward_stream, streams.copy_stream
        self.num_launches = 0

    def launch(self, work: Work) -> Pending:
        self.num_launches += 1
        with no_waiting():
            return super().launch(work)


@contextmanager
def no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nothing_waits_in_a_steady_decode_step(params: SamplingParams, page_size: int) -> None:
    llm = overlapped("tiny-dense", page_size=page_size)
    llm.generate(prompts(llm), params, progress=False)  # kernels are compiled
    llm.flush_cache()
    collectors = [llm.submit(prompt, params)[0] for prompt in prompts(llm)]
    while not all(collector.num_output_tokens for collector in collectors):
        llm.step()
    pipeline = scheduler_of(llm).pipeline
    streams = pipeline.streams = Checked(pipeline.streams)
    for _ in range(8):
        with no_waiting():  # forming, launching, processing results
            llm.step()
    assert streams.num_launches == 8
    while llm.step():
        pass
    assert all(collector.is_finished for collector in collectors)


def test_the_next_batch_is_queued_while_one_runs() -> None:
    """A step returns before the batch that it launched has begun."""
    llm = overlapped("tiny-dense")
    llm.submit(prompts(llm)[0], GREEDY)
    for _ in range(4):
        llm.step()
    pipeline = scheduler_of(llm).pipeline
    streams = pipeline.streams
    assert isinstance(streams, CudaStreams)
    pipeline.batches[0].results.wait()  # type: ignore[union-attr]
    with torch.cuda.stream(streams.forward_stream):
        torch.cuda._sleep(CYCLES_PER_SECOND // 2)
    llm.step()
    last = pipeline.batches[-1].results
    assert not last.arrived.query(), "the step waited for its own batch"  # type: ignore[union-attr]
    while llm.step():
        pass


def test_it_did_the_work() -> None:
    llm = overlapped("tiny-dense")
    assert llm.describe()["scheduler"] == "optimized"
    with DispatchRecord() as record:
        record.watch_engine(llm)
        llm.generate("one two", GREEDY, progress=False)
    record.expect_ran("scheduler.step", "diptych.optimized.scheduler.Scheduler")
