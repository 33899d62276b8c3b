"""Measures block diffusion against plain decoding with random weights.

The number of passes depends on a trained model's probabilities. Random weights give its two ends: with
threshold 0 all tokens of a block are filled in by its first pass, with threshold 1 one token by each pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.bench import result_header
from diptych.shared.types import DiffusionParams, ForwardBatch, ForwardMode, LogitsOutput, SamplingParams

NUM_REPEATS = 3


class CountedPasses:
    """`num_blocks`: the blocks of all passes of an engine, each as often as it was computed."""

    def __init__(self, llm: LLM) -> None:
        self.num_blocks = 0
        runner: Any = llm.assembly.parts.model_runner
        self._forward = runner.forward
        runner.forward = self.forward

    def forward(self, batch: ForwardBatch) -> LogitsOutput:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self.num_blocks += batch.batch_size
        output: LogitsOutput = self._forward(batch)
        return output


def measure(
    llm: LLM,
    counted: CountedPasses,
    batch_size: int,
    num_prompt: int,
    num_new: int,
    how: DiffusionParams | None,
) -> dict[str, Any]:
    """Output tokens a second, prefill included, and passes for each block."""
    # No end of sequence, and no mask in prompts.
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    prompts = [[10 + (31 * i + j) % 97 for j in range(num_prompt)] for i in range(batch_size)]
    seconds: list[float] = []
    for _ in range(1 + NUM_REPEATS):
        llm.flush_cache()
        counted.num_blocks, start = 0, time.perf_counter()
        llm.generate(prompts, params, diffusion=how, progress=False)
        seconds.append(time.perf_counter() - start)
    row: dict[str, Any] = {"batch_size": batch_size, "threshold": how and how.threshold}
    if how is not None:
        first, last = num_prompt // how.block_len, -(-(num_prompt + num_new) // how.block_len)
        row["passes_per_block"] = counted.num_blocks / (batch_size * (last - first))
    return row | {"tokens_per_s": batch_size * num_new / statistics.median(seconds[1:])}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tiny-dense")
    parser.add_argument("--panel", default="optimized")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--block-len", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    block_len, most = options.block_len, max(map(int, options.batch.split(",")))
    llm = LLM(
        model=options.model, load_format="dummy", panel=options.panel, device=options.device,
        page_size=block_len, max_running_requests=most, cuda_graph_block_len=block_len,
        max_total_tokens=most * (options.prompt + options.new + 2 * block_len) // block_len * block_len,
    )  # fmt: skip
    counted, rows = CountedPasses(llm), list[dict[str, Any]]()
    for batch_size in map(int, options.batch.split(",")):
        for threshold in (None, 1.0, 0.0):
            how = None if threshold is None else DiffusionParams(5, block_len, threshold)
            rows.append(measure(llm, counted, batch_size, options.prompt, options.new, how))
            print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        header = result_header.header("block-diffusion")
        result_header.write_json(options.json, header | {"block_len": block_len, "results": rows})


if __name__ == "__main__":
    main()
