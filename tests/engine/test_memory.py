"""On a GPU: steps take no more memory than the plan keeps for them."""

from __future__ import annotations

import gc

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.types import SamplingParams

pytestmark = pytest.mark.gpu


def test_the_largest_steps_stay_within_what_was_kept_for_them() -> None:
    """A full chunk of prompts with log-probabilities, and a full batch that decodes in every way."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    llm = LLM(
        model=str(ASSETS / "configs" / "Qwen3-0.6B"), load_format="dummy", device="cuda", panel="optimized",
        max_total_tokens=40_000, use={"attention": "triton"}, context_len=9_000,
    )  # fmt: skip
    memory, parts = llm.assembly.memory, llm.assembly.parts
    weights = sum(p.numel() * p.element_size() for p in llm.assembly.model.parameters())
    rows = parts.req_to_token_pool.req_to_token
    static = weights + parts.allocator.size * memory.bytes_per_token + rows.numel() * rows.element_size()

    logprobs = SamplingParams(max_new_tokens=2, return_logprob=True, logprob_start_len=0, ignore_eos=True)
    llm.generate([i % 1000 for i in range(8_900)], logprobs, progress=False)
    ways = (
        {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 50}, {"frequency_penalty": 0.1},
        {"return_logprob": True, "top_logprobs_num": 5},
    )  # fmt: skip
    for num_ways in (1, 3, len(ways)):
        params = [SamplingParams(max_new_tokens=3, ignore_eos=True, **ways[i % num_ways]) for i in range(256)]
        llm.generate([[1 + i, 2, 3] * 10 for i in range(256)], params, progress=False)
    assert parts.model_runner.replays.steps > 0
    taken = torch.cuda.max_memory_reserved() - before - static
    kept = sum(memory.reserved.values())
    print(f"steps took {taken / 2**30:.2f} GiB of {kept / 2**30:.2f} GiB kept for them: {memory.reserved}")
    assert taken <= kept
