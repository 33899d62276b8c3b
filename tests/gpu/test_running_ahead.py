"""Speculation with overlap scheduling on a GPU: same answers, no synchronization in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.optimized.overlap.streams import CudaStreams
from diptych.optimized.speculative.round import RoundInFlight
from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.whole_engine.switches import GREEDY, expect_answers, prompts
from diptych.shared.tools.training.own_texts import Target
from diptych.shared.tools.training.train_dflash import new_head, save_head
from diptych.shared.types import SamplingParams

from .harness import CYCLES_PER_SECOND, OPTIMIZED, name_of, optimized, reference_answers
from .test_scheduler import SAMPLED, Checked, no_waiting, scheduler_of

pytestmark = pytest.mark.gpu

USE = {
    **dict.fromkeys(("scheduler", "memory_pool", "drafter", "draft_tree"), "optimized"),
    "attention": "triton",  # takes float32
}
EAGLE = {
    "speculative": "eagle3",
    "speculative_draft_model": "tiny-dense-eagle3",
    "speculative_num_steps": 5,
    "speculative_topk": 4,
    "speculative_num_draft_tokens": 16,
}
CHAIN = {**EAGLE, "speculative_num_steps": 3, "speculative_topk": 1, "speculative_num_draft_tokens": 4}

FLAGS: tuple[dict[str, Any], ...] = (
    EAGLE,
    CHAIN,
    {**EAGLE, "disable_cuda_graph": True, "page_size": 4},
    {**EAGLE, "page_size": 16, "chunked_prefill_size": 64, "speculative_auto": True},
    {**CHAIN, "max_total_tokens": 320, "schedule_conservativeness": 0.01, "page_size": 16},  # memory is short
    {"speculative": "ngram"},
    {"speculative": "standalone", "speculative_draft_model": "tiny-dense"},
)


def speculating(**flags: Any) -> LLM:
    return optimized("tiny-dense", use=USE, **EAGLE, **flags)


@pytest.mark.parametrize("flags", FLAGS, ids=name_of)
def test_float32_answers_are_the_references(flags: dict[str, Any]) -> None:
    expected = [output.output_ids for output in reference_answers("tiny-dense")]
    expect_answers("tiny-dense", expected, **{**OPTIMIZED, "use": USE, **flags})


def test_answers_with_block_drafts_are_the_references(tmp_path: Path) -> None:
    """The head is not trained, so few drafts are right."""
    llm = LLM(model="tiny-dense", panel="reference", device="cpu", max_total_tokens=2048)
    target = Target(llm.assembly.parts.model_runner.model, llm.assembly.model_config, (2, 4, 5), 0)
    save_head(new_head(target, 2, 0, 8, seed=0), target, tmp_path)
    expected = [output.output_ids for output in reference_answers("tiny-dense")]
    flags = {"speculative": "dflash", "speculative_draft_model": str(tmp_path)}
    expect_answers("tiny-dense", expected, **{**OPTIMIZED, "use": USE, **flags})


def test_what_requests_ask_of_the_sampler_is_as_without_drafts() -> None:
    """Penalties count the tokens in flight; log-probabilities belong to the right tokens."""
    plain = optimized("tiny-dense", use=USE, dtype="float32")
    expected = plain.generate(prompts(plain), SAMPLED, progress=False)
    for found, wanted in zip(
        speculating(dtype="float32").generate(prompts(plain), SAMPLED, progress=False), expected
    ):
        assert found.output_ids == wanted.output_ids
        assert [e.token_id for e in found.output_logprobs] == [e.token_id for e in wanted.output_logprobs]
        for a, b in zip(found.output_logprobs, wanted.output_logprobs):
            assert abs(a.logprob - b.logprob) < 1e-3  # type: ignore[operator]  # sums in another order


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nothing_waits_in_a_steady_round(params: SamplingParams, page_size: int) -> None:
    llm = speculating(page_size=page_size)
    llm.generate(prompts(llm), params, progress=False)  # kernels are compiled
    llm.flush_cache()
    collectors = [llm.submit(prompt, params)[0] for prompt in prompts(llm)]
    while not all(collector.num_output_tokens for collector in collectors):
        llm.step()
    pipeline = scheduler_of(llm).pipeline
    streams = pipeline.streams = Checked(pipeline.streams)
    for _ in range(4):
        with no_waiting():  # forming, launching, processing results
            llm.step()
    assert streams.num_launches == 4
    assert isinstance(pipeline.batches[-1], RoundInFlight)
    while llm.step():
        pass
    assert all(collector.is_finished for collector in collectors)


def test_the_next_round_is_queued_while_one_runs() -> None:
    """A step returns before the round that it launched has begun."""
    llm = speculating()
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
    assert isinstance(pipeline.batches[-1], RoundInFlight)
    last = pipeline.batches[-1].results
    assert not last.arrived.query(), "the step waited for its own round"  # type: ignore[union-attr]
    while llm.step():
        pass
