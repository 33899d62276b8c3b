"""This project's kernels as functions of conventions, for `library_runs`: on a CUDA GPU, or in Triton's
interpreter. Attention is that of the Triton backend; the default one is FlashInfer's for long prompts. The
verification of drafts is left out: it accepts drafts that equal samples, which is another rate."""

from __future__ import annotations

from collections.abc import Callable
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


def layers() -> Any:
    return registry.load("layers", "optimized")


def ready(x: torch.Tensor) -> None:
    """Waits for what this file has prepared: a kernel may read sizes and tables before the launch that comes
    before it has ended, since in an engine they are older."""
    if x.is_cuda:
        torch.cuda.synchronize()


def rms_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    return norm_of(weight, eps)(x)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    """Both are written: copies with the same strides."""
    copies = (torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) for y in (x, residual))
    return norm_of(weight, eps).add_and_norm(*(copy.copy_(y) for copy, y in zip(copies, (x, residual))))


def norm_of(weight: Any, eps: float) -> Any:
    norm = layers().RMSNorm(len(weight), eps=eps)
    norm.weight = parameter(weight)
    return norm


def parameter(x: Any) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


def gemm(a: Any, b: Any) -> Any:
    with torch.device("meta"):
        linear = layers().Linear(b.shape[1], b.shape[0])
    linear.weight = parameter(b)
    return linear(a)


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    layer = layers().RotaryEmbedding(RopeConfig("default", 10000.0, 2 * cos.shape[1]), q.shape[2], len(cos))
    layer.table, positions = torch.cat((cos, sin), dim=1), torch.arange(len(q), device=q.device)
    ready(q)
    return layer(positions, q, k)


def silu_and_mul(x: Any) -> Any:
    return layers().SiluAndMul()(*x.chunk(2, dim=-1))


@cache
def experts_of(num_experts: int, num_chosen: int, intermediate_size: int, hidden_size: int) -> Any:
    config = MoEConfig(num_experts, num_chosen, intermediate_size, norm_topk_prob=False)
    with torch.device("meta"):
        return registry.load("moe", "optimized")(config, hidden_size).experts


def moe(x: Any, w13: Any, w2: Any, topk_weights: Any, topk_ids: Any) -> Any:
    experts = experts_of(len(w2), topk_ids.shape[1], w2.shape[2], w2.shape[1])
    experts.w13, experts.w2 = parameter(w13), parameter(w2)
    return experts(x, TopKOutput(topk_weights, topk_ids))


def w8a8(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: torch.dtype) -> Any:
    return own_kernels.w8a8(a, b.T, scale_a, scale_b.T, dtype)()


def sampler(logits: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """With other seeds in each call: the kernel's draws follow from the seed and the place of a row."""
    seeds = torch.randint(2**31, (len(logits),), device=logits.device)
    return own_kernels.sampler(logits, temperature, top_k, top_p, seeds)()


def slots_of(page_table: Any, page_size: int) -> Any:
    """The rows of req_to_token: int32 [num_requests, max_pages * page_size]."""
    places = torch.arange(page_size, dtype=torch.int32, device=page_table.device)
    return (page_table[:, :, None] * page_size + places).flatten(1)


def latent(q: Any, k: Any, table: Any, lens: Any, rank: int, *, softmax_scale: float, causal: bool) -> Any:
    num_requests, _, num_heads, _ = q.shape
    counters = torch.zeros(num_requests * num_heads, dtype=torch.int32, device=q.device)
    slots, rows = slots_of(table, k.shape[1]), torch.arange(num_requests, device=q.device)
    lens = lens.long()
    ready(q)
    decode = registry.load_part("mla_decode").mla_decode
    out = decode(q[:, 0], k.flatten(0, 1), slots, rows, lens, counters,
                 kv_lora_rank=rank, scale=softmax_scale, page_size=k.shape[1])  # fmt: skip
    return out[:, None]


def decode(q: Any, k: Any, v: Any, page_table: Any, lens: Any, window_left: int = -1) -> Any:
    return attend(q, k, v, page_table, lens, list(range(len(q) + 1)), ForwardMode.DECODE, window_left)


def extend(q: Any, k: Any, v: Any, page_table: Any, lens: Any, starts: Any, window_left: int = -1) -> Any:
    return attend(q, k, v, page_table, lens, starts.tolist(), ForwardMode.EXTEND, window_left)


def attend(q: Any, k: Any, v: Any, page_table: Any, lens: Any, starts: list[int], mode: ForwardMode,
           window: int) -> Any:  # fmt: skip
    """The pages are the pool, and the page table is that of its requests."""
    _, page_size, num_kv_heads, head_dim = k.shape
    pool: Any = registry.load("memory_pool", "reference").TokenToKVPool(
        page_size, page_size, 1, num_kv_heads, head_dim, k.dtype, q.device
    )
    pool._k, pool._v = k.flatten(0, 1)[None], v.flatten(0, 1)[None]
    rows: Any = SimpleNamespace(req_to_token=slots_of(page_table, page_size))
    none, num_requests = torch.zeros(len(q), dtype=torch.int64, device=q.device), len(lens)
    places = torch.tensor(starts, device=q.device)
    batch = ForwardBatch(
        mode, none, none, torch.arange(num_requests, device=q.device), lens.long(), none,
        places.diff(), places[:-1].contiguous(), tuple(lens.tolist()),
        tuple(end - start for start, end in pairwise(starts)),
    )  # fmt: skip
    backend = registry.load("attention", "triton")(rows, pool)
    plan = backend.plan(batch)
    layer = AttentionLayer(0, q.shape[1], num_kv_heads, head_dim, head_dim**-0.5, sliding_window=window)
    ready(q)
    return backend.run(q, layer, plan)


OWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("attention.decode", "torch"): decode,
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
