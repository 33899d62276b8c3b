"""Launches of every kernel, in the sizes of the models of shared/assets: what test_portability.py compiles.

The tensors are on the default device. Nothing is computed: the worker sets the device "meta".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diptych.optimized.kernels.attention.decode_attention import decode_attention
from diptych.optimized.kernels.attention.extend_attention import extend_attention
from diptych.optimized.kernels.attention.fixed_split_attention import fixed_split_attention
from diptych.optimized.kernels.attention.fp8_decode_attention import fp8_decode_attention, suits_fp8_kernel
from diptych.optimized.kernels.attention.qk_norm_rope_store import mean_squares, qk_norm_rope_store
from diptych.optimized.kernels.attention.tree_attention import tree_attention
from diptych.optimized.kernels.collectives.one_shot_all_reduce import OneShotAllReduce
from diptych.optimized.kernels.linear import fixed_order_gemm, rms_norm, small_batch_linear
from diptych.optimized.kernels.linear.dequantize import dequantize
from diptych.optimized.kernels.linear.quantize_input import quantize_input
from diptych.optimized.kernels.linear.quantized_gemm import quantized_gemm
from diptych.optimized.kernels.linear.quantized_gemv import quantized_gemv, suits_gemv
from diptych.optimized.kernels.linear.silu_and_mul import act_and_mul
from diptych.optimized.kernels.moe import moe_tiles
from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.kernels.moe.moe_combine import combine
from diptych.optimized.kernels.moe.moe_gemm import down_gemm, up_gemm
from diptych.optimized.kernels.moe.moe_gemv import gemv_experts
from diptych.optimized.kernels.moe.moe_permute import (
    distinct_choices,
    quantize_pairs,
    sort_pairs,
    weighted_sum,
)
from diptych.optimized.kernels.moe.moe_tiles import GemvTile, Shape
from diptych.optimized.quantized.quantized_moe import QuantizedExperts
from diptych.optimized.sampler import Sampler
from diptych.shared.config import read_config
from diptych.shared.config.quant_config import ONLINE
from diptych.shared.interfaces import TopKOutput
from diptych.shared.types import SamplingBatchInfo
from diptych.shared.types.attention import FP8
from diptych.shared.types.quant_scheme import QuantScheme
from tests.kernels.mode_launches import linear_attention, local, lora, mla, turn

Launch = Callable[[], object]
NUM_KV_HEADS = 8
PAGE_SIZES = {64: 16}
"""By head_dim; elsewhere 1."""
EXPERT_SCHEMES = {
    "fp8": QuantScheme("fp8", inputs="token"),
    "fp8-block": QuantScheme("fp8", 128, 128, "group"),
    "fp8-weight": QuantScheme("fp8"),
    "fp8-static": QuantScheme("fp8", None, inputs="static"),
    "int8": QuantScheme("int8", inputs="token"),
    "int4": QuantScheme("int4", group_size=128, symmetric=False),
    "mxfp4": QuantScheme("mxfp4", group_size=32),
    "nvfp4": QuantScheme("nvfp4", group_size=16),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def clear_caches() -> None:
    """Forget choices that hold for one GPU."""
    moe_tiles.plan.cache_clear()
    fixed_order_gemm.plan.cache_clear()


def _attention(
    head_dim: int,
    group: int,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """q, K, V, and what says where a request's keys are."""
    q = torch.empty(batch * tokens, group * NUM_KV_HEADS, head_dim, dtype=dtype)
    k, v = torch.empty(2, 4096, NUM_KV_HEADS, head_dim, dtype=kv_dtype or dtype)
    rows, seq_lens = torch.empty(2, batch, dtype=torch.int64)
    return q, k, v, torch.empty(512, 8192, dtype=torch.int32), rows, seq_lens


def decode(
    head_dim: int,
    group: int,
    batch: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    q, *others = _attention(head_dim, group, batch, 1, dtype, kv_dtype)
    counters = torch.empty(batch * NUM_KV_HEADS, dtype=torch.int32)
    page_size = PAGE_SIZES.get(head_dim, 1)
    attention = fp8_decode_attention if suits_fp8_kernel(q, others[0]) else decode_attention
    attention(q, *others, counters, out=torch.empty_like(q), scale=1.0, page_size=page_size, **options)


def extend(
    head_dim: int,
    group: int,
    tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    masked: bool = False,
    **options: Any,
) -> None:
    batch = 1 if "num_keys" in options else 4
    q, *others = _attention(head_dim, group, batch, tokens, dtype, kv_dtype)
    new = torch.empty(2, batch, dtype=torch.int64)
    mask = torch.empty(1 << 20, dtype=torch.bool) if masked else None
    extend_attention(
        q, *others, *new, out=torch.empty_like(q), scale=1.0, custom_mask=mask,
        page_size=PAGE_SIZES.get(head_dim, 1), **options,
    )  # fmt: skip


def tree(head_dim: int, group: int, tokens: int, *dtypes: torch.dtype, **options: Any) -> None:
    batch = 4
    q, *others = _attention(head_dim, group, batch, tokens, *dtypes)
    mask = torch.empty(batch, tokens, tokens, dtype=torch.bool)
    tree_attention(q, *others, out=torch.empty_like(q), scale=1.0, tree_mask=mask, **options)


def deterministic(
    head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options: Any
) -> None:
    """A GEMM of each size of tile, and attention of few and many requests."""
    for num_tokens in (1, 32, 64, 192, 256, 512, 8192):
        x, weight = torch.empty(num_tokens, 4096, dtype=dtype), torch.empty(4096, 4096, dtype=dtype)
        fixed_order_gemm.linear_add(x, weight, torch.empty_like(x))
    for is_decode in (True, False):
        q, *others = _attention(head_dim, group, 4, 1 if is_decode else 32, dtype, kv_dtype)
        new = torch.empty(2, 4, dtype=torch.int64)
        page_size = PAGE_SIZES.get(head_dim, 1)
        fixed_split_attention(
            q, *others, *new, out=torch.empty_like(q), scale=1.0, is_decode=is_decode, page_size=page_size,
            **options,
        )  # fmt: skip


def linear(num_tokens: int, size: int, out: int, dtype: torch.dtype, kind: str) -> None:
    """As a decoder layer calls it: the QKV projection with a norm, gate and up, O or down with the sum."""
    x, norm = torch.empty(num_tokens, size, dtype=dtype), torch.empty(size, dtype=dtype)
    weight = torch.empty(out, size, dtype=dtype)
    if kind == "norm":
        small_batch_linear.norm_linear(x, norm, 1e-6, weight)
    elif kind == "gated":
        small_batch_linear.norm_linear_silu(x, norm, 1e-6, weight)
    else:
        partial_sums = small_batch_linear.linear_partial_sums(x, weight)
        if partial_sums is not None:
            rms_norm.add_partial_sums_rms_norm(
                partial_sums, torch.empty(num_tokens, out, dtype=dtype), torch.empty(out, dtype=dtype), 1e-6
            )
        small_batch_linear.linear_add(x, weight, torch.empty(num_tokens, out, dtype=dtype))


def experts(shape: Shape, num_tokens: int, dtype: torch.dtype, limit: float = 0.0) -> None:
    """`limit` > 0: with biases and a clamped SwiGLU."""
    num_experts, top_k, hidden, inter = shape
    x = torch.empty(num_tokens, hidden, dtype=dtype)
    w13 = torch.empty(num_experts, 2 * inter, hidden, dtype=dtype)
    w2 = torch.empty(num_experts, hidden, inter, dtype=dtype)
    b13 = torch.empty(num_experts, 2 * inter, dtype=dtype) if limit > 0 else None
    b2 = torch.empty(num_experts, hidden, dtype=dtype) if limit > 0 else None
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32)
    weights = torch.empty(num_tokens, top_k)
    up, down = moe_tiles.plan(shape, num_tokens, dtype, x.device)
    if isinstance(up, GemvTile):
        gemv_experts(x, weights, ids, w13, w2, (up, down), b13, b2, limit)
    else:
        blocks = align(ids, num_experts, up.block_m)
        act = up_gemm(x, w13, blocks, top_k, up, b13, limit)
        combine(down_gemm(act, w2, blocks, weights, down, b2), ids)


def quantized(num_tokens: int, size: int, out: int, dtype: torch.dtype, kind: str) -> None:
    """A layer with its input quantized alone, after a norm and after SwiGLU."""
    scheme = ONLINE[kind]
    x, norm = torch.empty(num_tokens, size, dtype=dtype), torch.empty(size, dtype=dtype)
    gate_up = torch.empty(num_tokens, 2 * size, dtype=dtype)
    tensors = {name: torch.empty(shape, dtype=t) for name, (shape, t) in scheme.tensors(out, size).items()}
    weight, scale, zero = tensors["weight"], tensors["weight_scale"], tensors.get("weight_global")
    y = torch.empty(num_tokens, out, dtype=dtype)
    if suits_gemv(x, scheme, size):
        quantized_gemv(x, weight, scale, None, scheme, y)
    elif scheme.inputs == "none":
        quantized_gemm(x, weight, scale, zero, scheme, y)
        dequantize(weight, scale, zero, scheme, dtype)
    else:
        quantize_input(x, scheme, norm=(norm, 1e-6))
        values = quantize_input(gate_up, scheme, silu=True)
        kernel = quantized_gemv if suits_gemv(values, scheme, size) else quantized_gemm
        kernel(values, weight, scale, None, scheme, y, residual=y)


def quantized_experts(shape: Shape, num_tokens: int, dtype: torch.dtype, scheme: QuantScheme) -> None:
    num_experts, top_k, hidden, inter = shape
    experts = QuantizedExperts(num_experts, hidden, inter, scheme, bias=True, swiglu_limit=7.0)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32)
    topk = TopKOutput(torch.empty(num_tokens, top_k), ids)
    experts(torch.empty(num_tokens, hidden, dtype=dtype), topk)


def permuted(shape: Shape, num_tokens: int, dtype: torch.dtype) -> None:
    """Rows by expert for the GEMMs of a library, in each layout, and the weighted sum of their results."""
    num_experts, top_k, hidden, inter = shape
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32)
    topk = TopKOutput(torch.empty(num_tokens, top_k), ids)
    distinct_choices(topk)
    for alignment, by_expert in ((1, False), (128, False), (128, True)):
        order = sort_pairs(ids, num_experts, alignment, by_expert)
        num_rows = len(order.pairs)
        if hidden % 128 == 0:
            quantize_pairs(torch.empty(num_tokens, hidden, dtype=dtype), order.slots, num_rows)
        if inter % 128 == 0:
            gate_up = torch.empty(num_rows, 2 * inter, dtype=dtype)
            quantize_pairs(gate_up, order.slots, num_rows, silu=True)
        weighted_sum(torch.empty(num_rows, hidden, dtype=dtype), order.slots, topk)


def rows(num_tokens: int, hidden: int, inter: int, dtype: torch.dtype, is_gemma: bool = False) -> None:
    x, weight = torch.empty(num_tokens, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    rms_norm.rms_norm(x, weight, 1e-6, unit_offset=is_gemma)
    rms_norm.add_rms_norm(x, torch.empty_like(x), weight, 1e-6, unit_offset=is_gemma)
    rms_norm.rms_norm_add(x, torch.empty_like(x), weight, 1e-6, unit_offset=is_gemma)
    gate_up = torch.empty(num_tokens, 2 * inter, dtype=dtype)
    act_and_mul(*gate_up.chunk(2, dim=-1), is_gelu=is_gemma)


def rope(
    num_tokens: int,
    head_dim: int,
    rotary_dim: int,
    normed: bool,
    dtype: torch.dtype,
    is_gemma: bool = False,
    kv_dtype: torch.dtype | None = None,
    q_spacing: int = 1,
    wide: bool = False,
) -> None:
    num_qo_heads = 4 * NUM_KV_HEADS
    qkv = torch.empty(num_tokens, (q_spacing * num_qo_heads + 2 * NUM_KV_HEADS) * head_dim, dtype=dtype)
    positions, slots = torch.empty(2, num_tokens, dtype=torch.int64)
    weight = torch.empty(num_qo_heads * head_dim if wide else head_dim, dtype=dtype) if normed else None
    means = mean_squares(qkv, num_qo_heads * head_dim, NUM_KV_HEADS * head_dim) if wide else None
    k, v = torch.empty(2, 4096, NUM_KV_HEADS, head_dim, dtype=kv_dtype or dtype)
    cos_sin = torch.empty(4096, rotary_dim)
    qk_norm_rope_store(
        qkv, positions, cos_sin, weight, weight, 1e-6, is_gemma, k, v, slots, num_qo_heads, NUM_KV_HEADS,
        head_dim, means=means,
    )  # fmt: skip


def sample(num_rows: int, vocab_size: int, filtered: bool, logprobs: bool, greedy: bool) -> None:
    floats, ints = torch.empty(3, num_rows).unbind(), torch.empty(2, num_rows, dtype=torch.int64).unbind()
    info = SamplingBatchInfo(
        temperatures=floats[0], top_ks=ints[0], top_ps=floats[1], min_ps=floats[2], seeds=ints[1],
        is_greedy=torch.empty(num_rows, dtype=torch.bool), is_all_greedy=greedy, needs_filter=filtered,
        logit_bias=torch.empty(num_rows, vocab_size), return_logprob=logprobs,
        num_top_logprobs=5 if logprobs else 0,
    )  # fmt: skip
    positions = torch.empty(num_rows, dtype=torch.int64)
    Sampler().sample(torch.empty(num_rows, vocab_size), info, positions)


def one_shot(size: int, hidden: int, dtype: torch.dtype) -> None:
    """The sum alone, with the residual and a norm, and in parts; rows that are gathered."""
    inboxes = [torch.empty(2, size, 1 << 18, dtype=torch.int64) for _ in range(size)]
    all_reduce = OneShotAllReduce(inboxes, rank=0)
    x, weight = torch.empty(5, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    all_reduce(x)
    all_reduce.gather(torch.empty(5, hidden, dtype=torch.int32))
    all_reduce.reduce_scatter(torch.empty(5 * size, hidden, dtype=dtype))
    for unit_offset in (False, True):
        all_reduce.add_rms_norm(x, torch.empty_like(x), weight, 1e-6, unit_offset)


def _launches() -> dict[str, Launch]:
    """By name: the kernel family, then its sizes."""
    found: dict[str, Launch] = {}

    def add(launch: Callable[..., None], name: str, *sizes: Any, **options: Any) -> None:
        found[f"{launch.__name__}-{name}"] = partial(launch, *sizes, **options)

    for head_dim in (64, 96, 128, 256):
        for dtype, groups in (("bf16", (4, 64)), ("fp16", (4,)), ("fp32", (4,))):
            for group in groups:
                name = f"d{head_dim}-g{group}-{dtype}"
                add(decode, name, head_dim, group, 64, DTYPES[dtype])
        extras: dict[str, Any] = {"sliding_window": 100, "logit_cap": 30.0, "sinks": torch.empty(32)}
        add(decode, f"d{head_dim}-g4-bf16-extras", head_dim, 4, 1, torch.bfloat16, **extras)
        for dtype, all_tokens in (("bf16", (4, 8, 16, 32)), ("fp16", (32,)), ("fp32", (4, 32))):
            for tokens in all_tokens:
                name = f"d{head_dim}-m{4 * tokens}-{dtype}"
                add(extend, name, head_dim, 4, tokens, DTYPES[dtype])
                add(tree, name, head_dim, 4, tokens, DTYPES[dtype])
        add(extend, f"d{head_dim}-m128-bf16-extras", head_dim, 4, 32, torch.bfloat16, **extras)
        add(tree, f"d{head_dim}-m128-bf16-extras", head_dim, 4, 32, torch.bfloat16, **extras)
        add(extend, f"d{head_dim}-m128-bf16-parts", head_dim, 4, 32, torch.bfloat16, num_keys=9999)
        add(extend, f"d{head_dim}-m128-bf16-masked", head_dim, 4, 32, torch.bfloat16, masked=True)
        for dtype in DTYPES:
            add(deterministic, f"d{head_dim}-g4-{dtype}", head_dim, 4, DTYPES[dtype])
        add(deterministic, f"d{head_dim}-g4-bf16-extras", head_dim, 4, torch.bfloat16, **extras)
        add(rope, f"d{head_dim}-t8", 8, head_dim, head_dim, True, torch.bfloat16)
        add(rope, f"d{head_dim}-t8-gemma", 8, head_dim, head_dim, True, torch.bfloat16, is_gemma=True)
        add(rope, f"d{head_dim}-t8-gates", 8, head_dim, head_dim // 4, True, torch.bfloat16, q_spacing=2)
        add(rope, f"d{head_dim}-t8-wide", 8, head_dim, head_dim // 2, True, torch.bfloat16, wide=True)
        add(rope, f"d{head_dim}-t1024-half", 1024, head_dim, head_dim // 2, False, torch.float16)
        add(decode, f"d{head_dim}-g64-bf16-fp8kv", head_dim, 64, 64, torch.bfloat16, FP8)
        for name, dtype in DTYPES.items():
            add(decode, f"d{head_dim}-g4-{name}-fp8kv", head_dim, 4, 64, dtype, FP8)
            for tokens in (4, 32):
                add(extend, f"d{head_dim}-m{4 * tokens}-{name}-fp8kv", head_dim, 4, tokens, dtype, FP8)
                add(tree, f"d{head_dim}-m{4 * tokens}-{name}-fp8kv", head_dim, 4, tokens, dtype, FP8)
            add(rope, f"d{head_dim}-t8-{name}-fp8kv", 8, head_dim, head_dim, True, dtype, kv_dtype=FP8)
            add(deterministic, f"d{head_dim}-g4-{name}-fp8kv", head_dim, 4, dtype, FP8)
    add(turn, "t64-fp32", 64, torch.float32)
    add(turn, "t4096-bf16", 4096, torch.bfloat16)
    for group in (4, 8):
        add(decode, f"d512-g{group}-bf16", 512, group, 64, torch.bfloat16)
        for tokens in (4, 32):
            add(extend, f"d512-m{group * tokens}-bf16", 512, group, tokens, torch.bfloat16)
    for num_heads in (10, 16, 128):
        for name, dtype in DTYPES.items():
            add(mla, f"decode-h{num_heads}-{name}", "decode", num_heads, 1, dtype)
            add(mla, f"rope-h{num_heads}-{name}", "rope", num_heads, 1, dtype)
            add(mla, f"few-h{num_heads}-{name}", "few", num_heads, 1, dtype)
            for kind, tokens in (("decode", 1), ("rope", 1), ("few", 1), ("extend", 4)):
                add(mla, f"{kind}-h{num_heads}-{name}-fp8kv", kind, num_heads, tokens, dtype, FP8)
            for tokens in (4, 200):
                add(mla, f"extend-h{num_heads}-t{tokens}-{name}", "extend", num_heads, tokens, dtype)
                add(mla, f"expanded-h{num_heads}-t{tokens}-{name}", "expanded", num_heads, tokens, dtype)
    for model, config in MODELS.items():
        hidden, inter = config.hidden_size, config.intermediate_size
        q, kv = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for num_tokens, dtype in ((1, "bf16"), (4, "fp16"), (16, "bf16"), (32, "fp16"), (64, "bf16")):
            name = f"{model}-t{num_tokens}"
            add(linear, f"{name}-qkv", num_tokens, hidden, q + 2 * kv, DTYPES[dtype], "norm")
            add(linear, f"{name}-o", num_tokens, q, hidden, DTYPES[dtype], "sum")
            if config.moe is None:
                add(linear, f"{name}-gate-up", num_tokens, hidden, 2 * inter, DTYPES[dtype], "gated")
                add(linear, f"{name}-down", num_tokens, inter, hidden, DTYPES[dtype], "sum")
        add(rows, model, 64, hidden, inter, torch.bfloat16, is_gemma=config.norm_unit_offset)
        if config.moe is not None:
            moe = config.moe
            shape = Shape(moe.num_experts, moe.num_experts_per_tok, hidden, moe.intermediate_size)
            for num_tokens, dtype in ((1, "bf16"), (64, "fp16"), (512, "bf16"), (4096, "bf16"), (64, "fp32")):
                name = f"{model}-t{num_tokens}-{dtype}"
                add(experts, name, shape, num_tokens, DTYPES[dtype], moe.swiglu_limit)
    for kind in ONLINE:
        config = MODELS["Qwen3-8B"]
        hidden, inter = config.hidden_size, config.intermediate_size
        for num_tokens, dtype in ((1, "bf16"), (64, "fp16"), (4096, "bf16"), (16, "fp32")):
            add(quantized, f"{kind}-t{num_tokens}-{dtype}", num_tokens, inter, hidden, DTYPES[dtype], kind)
    for name, dtype in DTYPES.items():
        add(linear_attention, name, dtype)
        add(linear_attention, f"{name}-drafts", dtype, 4, 4)
        add(linear_attention, f"{name}-behind-drafts", dtype, 4)
        add(linear_attention, f"{name}-kda", dtype, kda=True)
        add(linear_attention, f"{name}-kda-drafts", dtype, 4, 4, kda=True)
    for rank in (16, 64, 128):
        for name, dtype in DTYPES.items():
            add(lora, f"r{rank}-{name}", rank, dtype)
    for kind, scheme in EXPERT_SCHEMES.items():
        for num_tokens in (4, 512):
            shape = Shape(32, 4, 2880, 2880) if kind == "mxfp4" else Shape(128, 8, 2048, 768)
            name = f"{kind}-t{num_tokens}"
            add(quantized_experts, name, shape, num_tokens, torch.bfloat16, scheme)
    for num_tokens in (16, 4096):
        add(permuted, f"t{num_tokens}", shape, num_tokens, torch.bfloat16)
    add(local, "t5", 5)
    for size in (2, 4, 8):
        for name, dtype in DTYPES.items():
            for hidden in (96, 2560, 8192):
                add(one_shot, f"t{size}-h{hidden}-{name}", size, hidden, dtype)
    for vocab_size in sorted({config.vocab_size for config in MODELS.values()}):
        add(sample, f"v{vocab_size}-greedy", 64, vocab_size, False, False, True)
        add(sample, f"v{vocab_size}-plain", 64, vocab_size, False, False, False)
        add(sample, f"v{vocab_size}-filtered", 64, vocab_size, True, False, False)
        add(sample, f"v{vocab_size}-logprobs", 256, vocab_size, True, True, False)
    return found


ASSETS = Path(__file__).parents[2] / "shared" / "assets"
MODELS = {
    path.parent.name: read_config(path.parent)
    for path in sorted(ASSETS.glob("**/config.json"))
    if "eagle3" not in path.parent.name
}
LAUNCHES = _launches()
