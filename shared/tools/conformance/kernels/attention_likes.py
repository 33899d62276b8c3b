"""Attention over a paged KV cache: decode and extend, with the batches of the attention contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.scheduling.pages import num_pages_of
from diptych.shared.tools.conformance.clauses.inputs import Inputs, type_name
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance
from diptych.shared.tools.conformance.contracts.attention.batches import (
    DECODE,
    EXTEND,
    MIXED,
    paged,
    with_heads,
)
from diptych.shared.tools.conformance.contracts.mla_attention.batches import SMALL
from diptych.shared.tools.conformance.kernels import own_kernels
from diptych.shared.tools.conformance.kernels.attention_suspects import (
    DECODE_SUSPECTS,
    MLA_SUSPECTS,
    SUSPECTS,
    dense,
    rounding_of_scores,
)
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Tensors
from diptych.shared.tools.conformance.oracles.attention_batches import (
    LAYER_ID,
    AttentionBatch,
    AttentionCase,
    in_types,
)
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase

BF16 = (torch.bfloat16,)
BOTH = (torch.float32, torch.bfloat16)
BATCHES = (
    *(case for page_size in (1, 4, 16) for case in paged(DECODE, page_size)),
    AttentionCase("one token, page 16", ((0, 1),), page_size=16),
    AttentionCase("one far longer, page 16", ((2, 1), (1, 1), (259, 1), (3, 1)), page_size=16),
    AttentionCase("around 128, page 16", tuple((n, 1) for n in (126, 127, 128, 129)), page_size=16),
    AttentionCase("around 256, page 64", tuple((n, 1) for n in (254, 255, 256, 257)), page_size=64),
    *(with_heads(paged(DECODE, 16)[0], *heads) for heads in ((3, 3), (6, 2), (8, 1), (7, 1), (16, 4))),
    *(replace(paged(DECODE, 16)[0], name=f"head_dim {d}, page 16", head_dim=d) for d in (80, 128, 256)),
)
SHARP = (
    AttentionCase("sharp, page 16", ((200, 1), (150, 1)), page_size=16, scale=10.0),
    AttentionCase("1100 equal scores, page 16", ((1100, 1),), page_size=16, scale=1e-3),
    AttentionCase("scores of hundreds, page 16", ((0, 1), (40, 1), (5, 1)), page_size=16, scale=50.0),
)
WINDOWS = tuple(
    case
    for window in (0, 15, 100)
    for case in in_types(
        AttentionCase(
            f"window {window}, page 16",
            ((0, 1), (14, 1), (15, 1), (16, 1), (259, 1)),
            page_size=16,
            sliding_window=window,
        ),
        *BOTH,
    )
)
EXTENDS = (
    *(case for page_size in (1, 4, 16) for batch in (EXTEND, MIXED) for case in paged(batch, page_size)),
    AttentionCase("around 128 new, page 16", tuple((3, n) for n in (127, 128, 129)), page_size=16),
    AttentionCase("longer than two tiles, page 16", ((40, 260),), page_size=16),
    *(with_heads(paged(EXTEND, 16)[0], *heads) for heads in ((6, 2), (8, 1))),
    replace(paged(EXTEND, 16)[0], name="head_dim 128, page 16", head_dim=128),
    AttentionCase("sharp, page 16", ((90, 60),), page_size=16, scale=10.0),
)

MLA_BATCHES = (
    *(MLACase(f"decode, page {p}", DECODE.requests, page_size=p) for p in (1, 16, 64)),
    MLACase("one token, page 64", ((0, 1),), page_size=64),
    MLACase("one far longer, 16 heads, page 64", ((2, 1), (259, 1), (3, 1)), page_size=64, num_qo_heads=16),
    MLACase("around 128, 20 heads, page 16", ((126, 1), (127, 1), (128, 1)), page_size=16, num_qo_heads=20),
)
SMALL_SIZES: dict[str, Any] = SMALL
SMALL_MLA = tuple(
    replace(each, name=f"small sizes, page 16, {type_name(each.dtype)}", page_size=16, **SMALL_SIZES)
    for each in (MLACase("", ((40, 1), (5, 1), (130, 1)), dtype=dtype) for dtype in BOTH)
)


def timed_mla(device: str) -> tuple[MLACase, ...]:
    on_gpu = device == "cuda"
    num_requests, num_heads = (16, 16) if on_gpu else (2, 4)
    return tuple(
        MLACase(
            f"{num_requests} x {n} tokens",
            ((n - 1, 1),) * num_requests,
            page_size=64,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            num_qo_heads=num_heads,
        )
        for n in ((256, 1024, 4096) if on_gpu else (128, 512, 2048))
    )


def typed(batches: tuple[AttentionCase, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[AttentionCase, ...]:
    return tuple(case for batch in batches for case in in_types(batch, *dtypes))


def timed(device: str, is_extend: bool) -> tuple[AttentionCase, ...]:
    """The timed problems: decode batches with growing sequences, or one prompt whose first half is cached.
    They are small on a CPU."""
    on_gpu = device == "cuda"
    heads = (32, 8, 128) if on_gpu else (8, 2, 64)
    lens = (256, 1024, 4096, 8192) if on_gpu else (128, 512, 2048)
    num_requests = 1 if is_extend else 16 if on_gpu else 4
    return tuple(
        AttentionCase(
            f"{num_requests} x {n} tokens, {'bfloat16' if on_gpu else 'float32'}",
            ((n // 2, n // 2) if is_extend else (n - 1, 1),) * num_requests,
            page_size=16,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
        )
        for n in lens
    )


def make_attention(case: AttentionCase, takes_scale: bool, seed: int = 0) -> Problem:
    """q [num_tokens, num_qo_heads, head_dim]; k, v [num_pages, page_size, num_kv_heads, head_dim];
    page_table int32 [num_requests, max_pages], padded with a page that is not live; lens, qo_indptr int32."""
    batch = replace(case, seed=case.seed + seed).make()
    if not takes_scale and case.scale != 1.0:
        batch.q = (batch.q.double() * case.scale).to(case.dtype)
        batch.layer = replace(batch.layer, scale=case.head_dim**-0.5)
    k, v = (
        buffer(LAYER_ID).view(-1, case.page_size, case.num_kv_heads, case.head_dim)
        for buffer in (batch.kv_pool.k_buffer, batch.kv_pool.v_buffer)
    )
    visible = [p + 1 for cached, new in case.requests for p in range(cached, cached + new)]
    row_bytes = 2 * case.num_kv_heads * case.head_dim * case.dtype.itemsize
    tensors = {"q": batch.q, "k": k, "v": v, **page_tables(batch)}
    problem = Problem(
        case.name,
        tensors,
        {"scale": batch.layer.scale, "window": case.sliding_window},
        dense,
        "attention",
        case.dtype,
        max(case.seq_lens),
        sum(case.seq_lens) * row_bytes + 2 * batch.q.numel() * case.dtype.itemsize,
        4.0 * case.num_qo_heads * case.head_dim * sum(visible),
        partial(_ours, batch),
    )
    is_beyond_table = case.dtype == torch.float32 and case.scale > 1.0  # its row is of scores of up to 10
    return replace(problem, limit=limit_of_large_scores(problem)) if is_beyond_table else problem


def limit_of_large_scores(problem: Problem) -> Callable[[Tensors], Tolerance]:
    """Float32: the row of the table, and what roundings of the scores of these inputs do."""

    @cache
    def limit() -> Tolerance:
        row = tolerance("attention", torch.float32)
        reason = (
            "scores are sums in float32: their roundings move the output by this much (rounding_of_scores)"
        )
        return replace(row, atol=row.atol + rounding_of_scores(problem), reason=reason)

    return lambda _: limit()


def page_tables(batch: AttentionBatch) -> dict[str, torch.Tensor]:
    """page_table, padded with a page that is not live, lens and qo_indptr."""
    case, device = batch.case, batch.q.device
    max_pages = max(num_pages_of(n, case.page_size) for n in case.seq_lens)
    slots = batch.req_to_token_pool.req_to_token[batch.rows, : max_pages * case.page_size]
    dead = batch.req_to_token_pool.req_to_token[batch.rows[0], -1]
    padded = dead.repeat(len(batch.rows), max_pages * case.page_size)
    padded[:, : slots.shape[1]] = slots
    return {
        "page_table": (padded[:, :: case.page_size] // case.page_size).to(torch.int32),
        "lens": torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        "qo_indptr": torch.tensor([0, *case.extend_seq_lens], device=device).cumsum(0).to(torch.int32),
    }


def make_mla(case: MLACase, takes_scale: bool, seed: int = 0) -> Problem:
    """q [num_tokens, num_qo_heads, kv_lora_rank + qk_rope_head_dim], with W_k absorbed; k [num_pages,
    page_size, 1, kv_lora_rank + qk_rope_head_dim], whose first kv_lora_rank numbers are the values too."""
    case = replace(case, seed=case.seed + seed)
    batch = case.make()
    rank, row_size = case.kv_lora_rank, case.kv_lora_rank + case.qk_rope_head_dim
    k = batch.kv_pool.k_buffer(LAYER_ID).view(-1, case.page_size, 1, row_size)
    num_tokens = sum(case.extend_seq_lens)
    q = Inputs(case.seed + 2).normal(num_tokens, case.num_qo_heads, row_size, dtype=case.dtype)
    constants = {"scale": batch.layer.scale, "window": -1, "rank": rank}
    problem = Problem(
        case.name,
        {"q": q, "k": k, **page_tables(batch)},
        constants,
        dense,
        "attention",
        case.dtype,
        max(case.seq_lens),
        sum(case.seq_lens) * row_size * case.dtype.itemsize + (2 * q.numel()) * case.dtype.itemsize,
        2.0 * case.num_qo_heads * (row_size + rank) * sum(case.seq_lens),
        own_kernels.on_gpu(own_kernels.mla_decode, batch, q),
    )
    return replace(problem, limit=limit_of_long_rows(row_size)) if case.dtype == torch.float32 else problem


def limit_of_long_rows(size: int) -> Callable[[Tensors], Tolerance]:
    """Float32: the row of the table, which is for scores of 64 products."""
    row, factor = tolerance("attention", torch.float32), (size / 64) ** 0.5
    reason = f"{row.reason}; a score is a sum of {size} products, whose roundings grow with their root"
    wider = replace(row, atol=factor * row.atol, rtol=factor * row.rtol, reason=reason)
    return lambda tensors: wider


def _ours(batch: AttentionBatch) -> object:
    name = "optimized" if batch.q.is_cuda else "reference"
    if not hasattr(batch, "backend_and_plan"):  # planned once per step, run in every layer
        backend = batch.backend(registry.load("attention", name))
        vars(batch)["backend_and_plan"] = backend, backend.plan(batch.forward_batch)
    backend, plan = vars(batch)["backend_and_plan"]
    return backend.run(batch.q, batch.layer, plan)


DECODE_LIKE = Like(
    "attention.decode",
    "One new token for each request attends to its KV pages.",
    "tokens of the longest request",
    (*typed(BATCHES, BOTH), *typed(SHARP, BF16)),
    partial(timed, is_extend=False),
    make_attention,
    DECODE_SUSPECTS,
    sparse="q",
    paged=("k", "v"),
    rows=("q", "page_table", "lens"),
    more_cases={"window": WINDOWS},
)
MLA_LIKE = Like(
    "mla.decode",
    "One new token for each request attends to latent KV rows, with W_k absorbed into the query.",
    "tokens of the longest request",
    typed(MLA_BATCHES, BOTH),
    timed_mla,
    make_mla,
    MLA_SUSPECTS,
    sparse="q",
    paged=("k",),
    rows=("q", "page_table", "lens"),
    more_cases={"small": SMALL_MLA},
)
EXTEND_LIKE = Like(
    "attention.extend",
    "New tokens of each request attend causally to its KV pages, which hold the new tokens too.",
    "tokens of the longest request",
    typed(EXTENDS, BOTH),
    partial(timed, is_extend=True),
    make_attention,
    SUSPECTS,
    sparse="q",
    paged=("k", "v"),
)
