"""This project's kernels as functions of conventions, for `library_runs`: on a CUDA GPU, or in Triton's
interpreter. Attention is the Triton backend. The verification of drafts is not among them: it accepts drafts
that equal samples, which is another rate."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from diptych.shared import registry
from diptych.shared.config import MoEConfig, RopeConfig
from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.kernels import own_kernels
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import AttentionLayer


def layer(name: str, *args: Any) -> Any:
    with torch.device("meta"):
        return getattr(registry.load("layers", "optimized"), name)(*args)


def weighted(module: Any, **weights: Any) -> Any:
    for name, weight in weights.items():
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return module


def ready(x: Any) -> None:
    """Waits for what this file has prepared: a kernel may read sizes and tables before the launch before it
    has ended, since in an engine they are older."""
    if x.is_cuda:
        torch.cuda.synchronize()


def rms_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    return weighted(layer("RMSNorm", len(weight), eps), weight=weight)(x)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    """It writes over both: copies of the same strides."""
    copies = (x.new_empty_strided(y.shape, y.stride()).copy_(y) for y in (x, residual))
    return weighted(layer("RMSNorm", len(weight), eps), weight=weight).add_and_norm(*copies)


def gemm(a: Any, b: Any) -> Any:
    return weighted(layer("Linear", b.shape[1], b.shape[0]), weight=b)(a)


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    config = RopeConfig("default", 10000.0, 2 * cos.shape[1])
    rotary = layer("RotaryEmbedding", config, q.shape[2], len(cos))
    rotary.table, positions = torch.cat((cos, sin), dim=1), torch.arange(len(q), device=q.device)
    ready(q)
    return rotary(positions, q, k)


def silu_and_mul(x: Any) -> Any:
    return layer("SiluAndMul")(*x.chunk(2, dim=-1))


@cache
def experts_of(num_experts: int, num_chosen: int, intermediate_size: int, hidden_size: int) -> Any:
    config = MoEConfig(num_experts, num_chosen, intermediate_size, norm_topk_prob=False)
    with torch.device("meta"):
        return registry.load("moe", "optimized")(config, hidden_size).experts


def moe(x: Any, w13: Any, w2: Any, topk_weights: Any, topk_ids: Any) -> Any:
    experts = experts_of(len(w2), topk_ids.shape[1], w2.shape[2], w2.shape[1])
    return weighted(experts, w13=w13, w2=w2)(x, TopKOutput(topk_weights, topk_ids))


def w8a8(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: torch.dtype) -> Any:
    return own_kernels.w8a8(a, b.T, scale_a, scale_b.T, dtype)()


def sampler(logits: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """Draws follow from a row's seed and place, so each call has other seeds."""
    seeds = torch.randint(2**31, (len(logits),), device=logits.device)
    return own_kernels.sampler(logits, temperature, top_k, top_p, seeds)()


def slots_of(page_table: Any, page_size: int) -> Any:
    """Rows of req_to_token: int32 [num_requests, max_pages * page_size]."""
    places = torch.arange(page_size, dtype=torch.int32, device=page_table.device)
    return (page_table[:, :, None] * page_size + places).flatten(1)


def latent(q: Any, k: Any, table: Any, lens: Any, rank: int, *, softmax_scale: float, causal: bool) -> Any:
    counters = torch.zeros(q.shape[0] * q.shape[2], dtype=torch.int32, device=q.device)
    where = slots_of(table, k.shape[1]), torch.arange(len(q), device=q.device), lens.long()
    ready(q)
    decode = registry.load_part("mla_decode").mla_decode
    return decode(q[:, 0], k.flatten(0, 1), *where, counters, kv_lora_rank=rank, scale=softmax_scale,
                  page_size=k.shape[1])[:, None]  # fmt: skip


def extend(q: Any, k: Any, v: Any, page_table: Any, lens: Any, starts: Any = None) -> Any:
    """The pages are the pool, and the page table is that of its requests. Without `starts`: decode."""
    _, page_size, num_kv_heads, head_dim = k.shape
    pool: Any = registry.load("memory_pool", "reference").TokenToKVPool(
        page_size, page_size, 1, num_kv_heads, head_dim, k.dtype, q.device
    )
    pool._k, pool._v = k.flatten(0, 1)[None], v.flatten(0, 1)[None]
    rows: Any = SimpleNamespace(req_to_token=slots_of(page_table, page_size))
    mode = ForwardMode.DECODE if starts is None else ForwardMode.EXTEND
    starts = torch.arange(len(q) + 1, device=q.device) if starts is None else starts.long()
    none = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    batch = ForwardBatch(
        mode, none, none, torch.arange(len(lens), device=q.device), lens.long(), none, starts.diff(),
        starts[:-1], tuple(lens.tolist()), tuple(end - start for start, end in pairwise(starts.tolist())),
    )  # fmt: skip
    backend = registry.load("attention", "triton")(rows, pool)
    plan = backend.plan(batch)
    ready(q)
    return backend.run(q, AttentionLayer(0, q.shape[1], num_kv_heads, head_dim, head_dim**-0.5), plan)


OWN: dict[tuple[str, str], Any] = {
    ("attention.decode", "torch"): extend,
    ("attention.extend", "torch"): extend,
    ("mla.decode", "flash-mla"): latent,
    ("rms_norm", "torch"): rms_norm,
    ("add_rms_norm", "torch"): add_rms_norm,
    ("rope", "torch"): rope,
    ("silu_and_mul", "torch"): silu_and_mul,
    ("gemm", "torch"): gemm,
    ("moe", "torch"): moe,
    ("w8a8", "torch"): w8a8,
    ("sampler", "torch"): sampler,
}
"""(operation, convention) -> the function."""
