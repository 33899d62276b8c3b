"""Times decode attention by backend: microseconds of one layer in a CUDA graph, against the bytes of K and V.

    python -m diptych.shared.tools.bench.attention_cost --backends triton,flashinfer,fa3 \
        --batch 1,8,64,256 --context 1024

Decode steps of `fa3` use the kernels of FlashAttention 2, so it is also measured as a prefill of one token
for each request, which its own kernels compute ("fa3, as prefill").
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.tools.bench import result_header
from diptych.shared.tools.bench.ceilings import measure_ceilings, median_time
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import AttentionLayer

NUM_LAYERS = 4
"""Of K and V, in turn: together larger than the L2 cache for all but the smallest batches."""
NUM_RUNS = 20
"""In a graph."""


@dataclass(frozen=True)
class DecodeCase:
    """The shape of a decode batch; the default is an 8B model's."""

    batch_size: int
    context_len: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def num_bytes(self) -> int:
        return 2 * self.batch_size * self.context_len * self.num_kv_heads * self.head_dim * 2


def decode_batch(case: DecodeCase, mode: ForwardMode, device: torch.device) -> ForwardBatch:
    """A decode batch of the requests in rows 1, 2, 3 ..."""
    bs, length = case.batch_size, case.context_len
    numbers = torch.arange(bs, device=device)
    return ForwardBatch(
        forward_mode=mode,
        input_ids=torch.zeros_like(numbers),
        positions=torch.full_like(numbers, length - 1),
        req_pool_indices=numbers + 1,
        seq_lens=torch.full_like(numbers, length),
        out_cache_loc=numbers,
        extend_seq_lens=torch.ones_like(numbers),
        extend_start_loc=numbers,
        seq_lens_cpu=(length,) * bs,
        extend_seq_lens_cpu=(1,) * bs,
    )


def measure(case: DecodeCase, name: str, mode: ForwardMode) -> float:
    """Median microseconds of one layer."""
    device = torch.device("cuda")
    pools = registry.load("memory_pool", "optimized")
    num_tokens = case.batch_size * case.context_len
    rows = pools.ReqToTokenPool(case.batch_size, case.context_len, device)
    slots = torch.randperm(num_tokens, device=device, dtype=torch.int32) + 1
    rows.req_to_token[1 : case.batch_size + 1] = slots.view(case.batch_size, -1)
    heads = (case.num_kv_heads, case.head_dim)
    kv_pool = pools.TokenToKVPool(num_tokens, 1, NUM_LAYERS, *heads, torch.bfloat16, device)
    for layer_id in range(NUM_LAYERS):
        kv_pool.k_buffer(layer_id).normal_()
        kv_pool.v_buffer(layer_id).normal_()
    q = torch.randn(case.batch_size, case.num_qo_heads, case.head_dim, dtype=torch.bfloat16, device=device)
    backend = registry.load("attention", name)(rows, kv_pool)
    layers = [
        AttentionLayer(i, case.num_qo_heads, *heads, scale=case.head_dim**-0.5) for i in range(NUM_LAYERS)
    ]
    plan = backend.plan(decode_batch(case, mode, device))

    def run() -> None:
        for i in range(NUM_RUNS):
            backend.run(q, layers[i % NUM_LAYERS], plan)

    run()  # compiles, and makes plans that are made at the first run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_time(graph.replay, device) / NUM_RUNS * 1e6


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backends", default="triton,flashinfer,fa3,deterministic")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--context", default="1024,4096")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("decode attention is measured on a CUDA GPU, and this torch sees none")
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    results: list[dict[str, Any]] = []
    for batch_size in map(int, options.batch.split(",")):
        for context_len in map(int, options.context.split(",")):
            case = DecodeCase(batch_size, context_len)
            bound = case.num_bytes / ceilings.bandwidth * 1e6
            for name in options.backends.split(","):
                kinds = {name: ForwardMode.DECODE}
                if name == "fa3":
                    kinds["fa3, as prefill"] = ForwardMode.EXTEND
                for label, mode in kinds.items():
                    microseconds = measure(case, name, mode)
                    results.append({**asdict(case), "backend": label, "us": microseconds, "bound_us": bound})
                    print(f"{batch_size} x {context_len} {label}: {microseconds:.1f} us, bound {bound:.1f}")
    if options.json is not None:
        facts = {"ceilings": result_header.ceilings_as_json(ceilings), "results": results}
        result_header.write_json(options.json, result_header.header("decode-attention") | facts)


if __name__ == "__main__":
    main()
