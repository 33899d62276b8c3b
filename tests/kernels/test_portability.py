"""Every launch fits the shared memory of each supported GPU: kernels are compiled here, without a GPU.

The tiles are those that the launchers choose there (compile_worker.py). Compilation ends with ptxas, so an
instruction that an architecture lacks fails too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compile_worker import GPUS, Launched
from tests.kernels.launches import LAUNCHES

ROOT = Path(__file__).parents[2]
FAST = (
    ("sm_80", "extend-d128-m128-bf16-fp8kv"),
    ("sm_89", "tree-d256-m64-bf16"),
    ("sm_86", "experts-Mixtral-8x7B-v0.1-t4096-bf16"),
    ("sm_90", "decode-d128-g4-bf16"),
    ("sm_90", "decode-d128-g4-bf16-fp8kv"),
    ("sm_90", "rope-d128-t8-bf16-fp8kv"),
    ("sm_86", "mla-extend-h16-t4-bf16"),
    ("sm_90", "mla-rope-h16-bf16"),
    ("sm_90", "one_shot-t2-h2560-bf16"),
    ("sm_90", "local-t5"),
    ("sm_90", "linear_attention-bf16"),
    ("sm_90", "quantized_experts-mxfp4-t512"),
    ("sm_90", "quantized-nvfp4-t1-bf16"),
    ("sm_120", "linear-Qwen3-8B-t16-qkv"),
    ("sm_90", "quantized-fp8-block-t4096-bf16"),
    ("sm_90", "quantized-int4-t1-bf16"),
)
MAX_SPILLED = 2048
"""Bytes of a thread on sm_90. A kernel whose tiles did not fit took 69 KB, and was 500 times as slow as its
bound."""
TILED = ("decode", "deterministic", "extend", "mla", "tree", "linear", "experts", "quantized")
"""Kernels whose tiles depend on the GPU. The others are compiled for the oldest and the newest GPU."""
FULL = [
    (gpu, name)
    for gpu in GPUS
    for name in LAUNCHES
    if (name.startswith(TILED) or gpu in ("sm_80", "sm_120")) and (gpu, name) not in FAST
]

DECODE_COPIES = 3
"""Of slots, K and V, in the loop. Pipelined, they also precede the loop, once for each tile in flight.
Triton leaves a loop that it cannot pipeline as it is, for instance one with a barrier."""

THREADS = re.compile(
    r"#ttg.linear<\{register = \[\], lane = \[\[1, 0\], \[2, 0\], \[4, 0\], \[8, 0\], \[16, 0\]\], .*"
    r"|#ttg.blocked<\{sizePerThread = \[1, 1\], threadsPerWarp = \[32, 1\], warpsPerCTA = \[1, \d+\], .*"
)
"""The layouts of warp_mma.py: dimension 0 is the lane, and each thread has one word."""

Ask = Callable[[str, str], list[Launched]]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Ask]:
    """(GPU, launch) -> the kernels launched."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.compile_worker"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(gpu: str, name: str) -> list[Launched]:
        print(json.dumps([gpu, name]), file=stdin, flush=True)
        answer: dict[str, Any] = {}
        while answer.get("asked") != [gpu, name]:  # an answer to a test that was stopped comes first
            answer = json.loads(stdout.readline())
        assert "error" not in answer, answer["error"]
        return [tuple(kernel) for kernel in answer["launched"]]

    yield ask
    stdin.close()
    assert process.wait(60) == 0


def check(compiled: Ask, gpu: str, name: str) -> None:
    launched = compiled(gpu, name)
    assert launched or name.startswith("linear"), "only cuBLAS, which is not Triton"
    num_ctas = 2 if name.startswith("decode-d64") and "fp32" not in name else 1  # of a multiprocessor
    limit = GPUS[gpu].shared_memory_per_cta(num_ctas)
    assert [kernel for kernel in launched if kernel[1] > limit] == []
    if gpu == "sm_90" and "fp32" not in name:
        assert [(kernel, spilled) for kernel, *_, spilled in launched if spilled > MAX_SPILLED] == []
    for kernel, _, _, layouts, _ in launched:
        assert bool(layouts) == (kernel == "_fp8_decode_kernel")
        assert [layout for layout in layouts if not THREADS.fullmatch(layout)] == []
    if name.startswith("decode") and launched[0][0] != "_fp8_decode_kernel":
        assert launched[0][2] >= 2 * DECODE_COPIES, "the loop is not pipelined"


@pytest.mark.parametrize(("gpu", "name"), FAST, ids=map("-".join, FAST))
def test_launches_fit(compiled: Ask, gpu: str, name: str) -> None:
    check(compiled, gpu, name)


@pytest.mark.full
@pytest.mark.parametrize(("gpu", "name"), FULL, ids=map("-".join, FULL))
def test_all_launches_fit(compiled: Ask, gpu: str, name: str) -> None:
    check(compiled, gpu, name)
