"""The kernel variants that an engine would launch on an H100, without a GPU.

Run as its own process with TRITON_INTERPRET=0; standard input: the flags of an engine, in JSON. Launchers run
unchanged on CPU tensors; Triton gets a driver that names the target, and nothing is launched. Prints what
requests, and all layers of the model, launch beyond what was compiled ahead.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from diptych.optimized.kernels import portable
from diptych.shared.types import DiffusionParams, SamplingParams
from tests.kernels.compile_worker import GPUS, NoDriver

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM

NUM_REQUESTS = (1, 2, 5, 17, 70)


def main() -> None:
    driver.set_active(NoDriver())
    # Before other modules import them.
    portable.gpu_of = lambda device: GPUS[NoDriver.name]
    torch.version.cuda = "13.0"  # as launchers find it on a GPU
    CompiledKernel._init_handles = lambda kernel: None
    # cuBLAS's: their results mean as little as the kernels', and a CPU takes minutes.
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
    torch.Tensor.addmm_ = lambda residual, *factors: residual

    from diptych.optimized.attention import triton as triton_attention
    from diptych.optimized.graphs import all_steps
    from diptych.optimized.kernels.compile_ahead import Variants, Zeros, compile_ahead
    from diptych.optimized.kernels.linear import rms_norm
    from diptych.shared import registry
    from diptych.shared.engine import compilations
    from diptych.shared.engine.llm import LLM
    from tests.gpu.test_compilations import random_prompts

    registry.runs_triton = lambda device: True
    triton_attention.JITFunction = type("NoFunction", (), {})

    flags = json.load(sys.stdin)
    variants = Variants()
    compile_one = variants.run_jit
    variants.run_jit = lambda *args, **options: None  # type: ignore[method-assign]
    JITFunction.run = lambda jit, *args, **options: variants.run(jit, *args, **options)
    with Zeros():
        llm = LLM(device="cpu", panel="optimized", dtype="bfloat16", max_total_tokens=65536, **flags)
        parts = llm.assembly.parts
        runner = parts.model_runner
        runner.steps.rehearse(runner, parts.sampler, parts.num_token_ids)
        if llm.config.speculative is not None:
            llm.scheduler.decoding.rehearse(llm.config)
        known, dice = set(variants.known), random.Random(0)
        all_steps.layers_of_rehearsal = lambda runner: nullcontext()
        runner.steps.rehearse(runner, parts.sampler, parts.num_token_ids)  # with all layers
        for num in NUM_REQUESTS:
            llm.generate(*random_prompts(llm, dice, num), progress=False)
            if llm.config.cuda_graph_block_len is not None:
                fill_blocks(llm, *random_prompts(llm, dice, num))
    JITFunction.run = compile_one
    new = [f"{jit.fn.__name__}{spec}" for jit, spec, *_ in variants.known - known]

    compilations.watch()
    counts = compilations.Compilations()
    found: list[Any] = []
    for _ in range(2):
        with compile_ahead(2):
            rms_norm.rms_norm(torch.zeros(5, 128, dtype=torch.bfloat16), torch.zeros(128), 1e-6)
        found.append([counts.num_after_ready, len(counts.after_ready)])
        rms_norm._rms_norm_kernel.device_caches.clear()  # as a new process has none
    print(json.dumps({"known": len(known), "new": new, "counts": found}))


def fill_blocks(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    """Requests with block diffusion, sampled in every way that it has. All tokens are 0."""
    fields = ("max_new_tokens", "temperature", "seed", "top_k", "top_p", "min_p")
    sampling = [SamplingParams(**{name: getattr(each, name) for name in fields}) for each in params]
    prompts = [[token_id if token_id != 1 else 2 for token_id in prompt] for prompt in prompts]
    block_len = llm.config.cuda_graph_block_len
    assert block_len is not None
    llm.generate(prompts, sampling, diffusion=DiffusionParams(1, block_len, 0.5), progress=False)


if __name__ == "__main__":
    main()
