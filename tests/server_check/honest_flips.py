"""Margins of single tokens of this project's own engine, by number format, behind GREEDY and SAMPLED.

python -m tests.server_check.honest_flips tiny-dense tiny-moe
"""

from __future__ import annotations

import sys

import numpy as np

from diptych.shared.tools.commands.check_engine import parse_spec, prompts_of
from diptych.shared.tools.conformance.server.seeded import CLIP, margin_of
from diptych.shared.tools.conformance.whole_engine.engine_gate import Rows, record

FORMATS = {
    "float32": "page_size=16,dtype=float32",
    "float16": "dtype=float16",
    "bfloat16": "dtype=bfloat16",
    "fp8": "dtype=bfloat16,quantization=fp8",
    "int8": "dtype=bfloat16,quantization=int8",
    "int4": "dtype=bfloat16,quantization=int4",
}
NUM_PROMPTS, NUM_TOKENS, NUM_SEEDS = 24, 16, 4


def rows_of(model: str, spec: str, forced: list[list[int]] | None) -> Rows:
    from diptych.shared.engine.llm import LLM

    llm = LLM(model=model, device="cpu", max_total_tokens=32768, **parse_spec(f"reference,{spec}"))
    return record(llm, prompts_of(model, NUM_PROMPTS, 1), forced, NUM_TOKENS)


def main(models: list[str]) -> None:
    for model in models:
        expected = rows_of(model, "dtype=float32", None)
        for name, spec in FORMATS.items():
            actual = rows_of(model, spec, expected.tokens)
            for temperature in (0.0, 1.0):
                margins = np.minimum(margins_of(expected, actual, temperature), CLIP)
                print(
                    f"{model} {name} at {temperature}: {(margins > 0).mean():.4%} flips of {len(margins)}, "
                    f"mean {margins.mean():.2e}, variance {margins.var():.2e}",
                    flush=True,
                )


def margins_of(expected: Rows, actual: Rows, temperature: float) -> np.ndarray:
    """Margins of the tokens that the format draws, with the reference's rows."""
    found = []
    for prompt, (true, other) in enumerate(zip(expected.logprobs, actual.logprobs)):
        for position in range(len(true)):
            for seed in range(NUM_SEEDS if temperature else 1):
                noise = prompt * 1000 + seed
                token = drawn(other[position], temperature, noise, position)
                found.append(margin_of(true[position], token, temperature, noise, position, 0))
    return np.array(found)


def drawn(row: np.ndarray, temperature: float, seed: int, position: int) -> int:
    import torch

    from diptych.shared.sampling.noise import gumbel_noise

    if temperature == 0:
        return int(row.argmax())
    noise = gumbel_noise(torch.tensor(seed), torch.tensor(position), torch.arange(len(row))).numpy()
    return int((row / temperature + noise).argmax())


if __name__ == "__main__":
    main(sys.argv[1:])
