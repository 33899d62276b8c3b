"""Block diffusion on a GPU: passes replayed from CUDA graphs give the reference's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.types import DiffusionParams, SamplingParams

from .harness import optimized, reference

pytestmark = pytest.mark.gpu

MASK_ID = 300
GREEDY = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
HOT = SamplingParams(max_new_tokens=30, top_p=0.95, top_k=50, min_p=0.01, seed=3, ignore_eos=True)
PROMPTS = [[(7 * i + n) % 290 for i in range(n)] for n in (1, 4, 9, 30, 77, 130)]
SAMPLING = [GREEDY, HOT, HOT.updated(seed=-1), GREEDY, HOT.updated(temperature=0.5), GREEDY]
PARAMS = DiffusionParams(MASK_ID, 4, 0.3)
FLAGS: dict[str, Any] = {"page_size": 16, "dtype": "float32"}


def answers(llm: LLM, params: DiffusionParams = PARAMS) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SAMPLING, diffusion=params, progress=False)
    return [output.output_ids for output in outputs]


@pytest.mark.parametrize("block_len", [4, 16])
def test_float32_answers_are_the_references(block_len: int) -> None:
    params = replace(PARAMS, block_len=block_len)
    expected = answers(reference("tiny-dense", **FLAGS), params)
    for flags in ({"cuda_graph_block_len": block_len}, {"cuda_graph_block_len": 8}, {}):
        llm = optimized("tiny-dense", "triton", **FLAGS, **flags, chunked_prefill_size=64)
        before = llm.assembly.parts.model_runner.replays.steps
        assert answers(llm, params) == expected
        is_replayed = llm.assembly.parts.model_runner.replays.steps > before
        assert is_replayed == (flags == {"cuda_graph_block_len": block_len})
        for prompt, sampling, answer in zip(PROMPTS, SAMPLING, expected if is_replayed else ()):  # alone
            output = llm.generate(prompt, sampling, diffusion=params, progress=False)
            assert output.output_ids == answer


def test_replays_are_what_is_launched() -> None:
    """In bfloat16 by the default backend, bit for bit: the same requests in the same order."""
    flags = {"page_size": 16, "dtype": "bfloat16", "cuda_graph_block_len": 4}
    llm = optimized("tiny-dense", **flags)
    replays = llm.assembly.parts.model_runner.replays
    before = replays.steps
    replayed = answers(llm)
    assert replays.steps > before
    assert answers(optimized("tiny-dense", **flags, disable_cuda_graph=True)) == replayed


def test_the_cpu_waits_once_a_pass() -> None:
    """Each wait within a pass would stop the GPU."""
    llm = optimized("tiny-dense", "triton", **FLAGS, cuda_graph_block_len=4)
    expected = answers(llm)
    decoding: Any = llm.scheduler.decoding
    num_passes, num_steps = 0, 0
    candidates, fill_blocks = decoding._candidates, decoding._fill_blocks

    def count(*args: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        torch.cuda.set_sync_debug_mode("error")  # until the CPU asks which blocks have masks
        try:
            return candidates(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def fill(*args: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return fill_blocks(*args)

    decoding._candidates, decoding._fill_blocks = count, fill
    assert answers(llm) == expected
    assert num_steps <= num_passes <= 4 * num_steps
