"""The loop of decode attention is pipelined: Triton compiles it for sm_90 here, without a GPU.

What Triton cannot pipeline it leaves as it is, without a word, and the kernel waits for every tile: a barrier
in the loop is enough, or an address that comes out of a branch.
"""

from __future__ import annotations

import os
import subprocess
import sys

CASES = """
few = 16, 128, {}
many = 256, 128, {}
few_extras = 64, 128, {"HAS_WINDOW": True, "HAS_CAP": True, "HAS_SINKS": True}
many_extras = 128, 128, {"HAS_WINDOW": True, "HAS_SINKS": True}
heads_of_64 = 16, 64, {"PAGE_SIZE": 16}
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from optimized.kernels.decode_attention import _decode_kernel, _tile
from optimized.kernels.split_kv import split_sizes

for batch_size, head_dim, options in (few, many, few_extras, many_extras, heads_of_64):
    block_n, programs, num_stages = _tile(2 * head_dim)
    constants = {
        **split_sizes(4, head_dim), "PAGE_SIZE": 1, "BLOCK_N": block_n, "BLOCK_BS": batch_size,
        "HAS_WINDOW": False, "HAS_CAP": False, "HAS_SINKS": False, "PRECISION": "tf32", "USE_PDL": True,
        "Q_EACH_TILE": programs == 1, "STRIDE_K": 8 * head_dim, "STRIDE_V": 8 * head_dim, **options,
    }
    types = {"workspace_ptr": "*fp32", "counters_ptr": "*i32", "scale": "fp32", "logit_cap": "fp32"}
    types |= {"req_pool_indices_ptr": "*i64", "seq_lens_ptr": "*i64", "req_to_token_ptr": "*i32"}
    signature, aligned = {}, {}
    for i, name in enumerate(_decode_kernel.arg_names):
        is_pointer = name.endswith("_ptr")
        kind = "constexpr" if name in constants else "*bf16" if is_pointer else "i32"
        signature[name] = types.get(name, kind)
        if is_pointer or name.startswith("stride"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(_decode_kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": num_stages},
    )
    copies = compiled.asm["ttgir"].count("ttg.async_copy_global_to_local")
    print(batch_size, head_dim, options, copies, programs * compiled.metadata.shared, sep="|")
"""
COPIES = 3
"""Of slots, K and V, at least. Pipelined, they also stand before the loop, once for each tile under way."""
SHARED_MEMORY = 227 * 1024
"""Of a multiprocessor. A third program, or one of two that does not fit, would upset the even shares."""


def test_reads_are_under_way_before_the_loop() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CASES + COMPILE],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(CASES.split("\n")) - 2
    for line in lines:
        copies, shared_memory = map(int, line.split("|")[3:])
        assert copies >= 2 * COPIES, line
        assert shared_memory <= SHARED_MEMORY, line
