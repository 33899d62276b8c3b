"""Clauses of attention, second part: features of a layer beyond plain causal attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_raises
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.attention.batches import DECODE, EXTEND, MIXED
from diptych.shared.tools.conformance.oracles.attention_batches import (
    LAYER_ID,
    AttentionBatch,
    AttentionCase,
    expect_attention,
    in_types,
    run_or_refuse,
)

LONG = AttentionCase("long prompt", ((40, 260),))
SPLIT = AttentionCase("decode, long", ((400, 1), (700, 1)))  # several CTAs process a request's keys
SINKS = (-30.0, 0.3, 2.0, 12.0)


@contract(
    "A sliding window w shows a token itself and the w before it.",
    tuple(
        case
        for batch in (DECODE, EXTEND, MIXED, LONG, replace(DECODE, name="decode, page 16", page_size=16))
        for window in (0, 1, 5, 31, 100, 127, 128)
        for case in in_types(
            replace(batch, name=f"{batch.name}, window {window}", sliding_window=window), torch.float32
        )
    )
    + in_types(replace(MIXED, name="mixed, window 7", sliding_window=7), torch.float16, torch.bfloat16),
)
def sliding_window(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "With chunks of c, a token sees the keys of its own chunk up to itself. Chunks begin at multiples of c, "
    "wherever the cached prefix ends.",
    tuple(
        case
        for batch in (DECODE, EXTEND, MIXED, LONG, replace(LONG, name="long prompt, page 4", page_size=4))
        for chunk in (1, 4, 31, 64, 300)
        for case in in_types(
            replace(batch, name=f"{batch.name}, chunks of {chunk}", attention_chunk=chunk), torch.float32
        )
    )
    + in_types(
        replace(MIXED, name="mixed, chunks of 8, sinks", attention_chunk=8, sinks=SINKS),
        torch.float16,
        torch.bfloat16,
    ),
)
def attention_chunks(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "What left every window changes nothing: its slots may hold other tokens by then.",
    (
        AttentionCase("decode", ((49, 1), (7, 2)), sliding_window=7),
        AttentionCase("decode, page 4", ((49, 1), (40, 1)), sliding_window=7, page_size=4),
        AttentionCase("extend", ((20, 180), (30, 4)), sliding_window=7),
        AttentionCase("extend, bfloat16", ((20, 180),), sliding_window=7, dtype=torch.bfloat16),
    ),
)
def slots_that_left_the_window(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    expected = batch.expected()
    for slots, (cached, _) in zip(batch.slots, case.requests):
        dead = slots[: max(cached - case.sliding_window, 0)]
        batch.kv_pool.k_buffer(LAYER_ID)[dead] *= 100.0
        batch.kv_pool.v_buffer(LAYER_ID)[dead] = 1000.0
    output = run_or_refuse(impl, batch)
    if output is not None:
        expect_close("output", output, expected, tolerance("attention", case.dtype))


@contract(
    "A soft-cap c makes a scaled score s into c * tanh(s / c).",
    tuple(
        case
        for batch in (DECODE, EXTEND)
        for logit_cap, scale in ((0.5, 1.7), (30.0, 1.7), (5.0, 13.6))
        for case in in_types(
            replace(batch, name=f"{batch.name}, cap {logit_cap:g}", logit_cap=logit_cap, scale=scale),
            torch.float32,
            torch.bfloat16,
        )
    ),
)
def soft_cap(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "A sink takes part in the softmax and adds no value.",
    tuple(
        case
        for batch in (DECODE, EXTEND, MIXED, SPLIT)
        for case in in_types(
            replace(batch, name=f"{batch.name}, sinks", sinks=SINKS), torch.float32, torch.bfloat16
        )
    ),
)
def sinks(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "Window, soft-cap and sinks of one layer, all at once.",
    tuple(
        case
        for batch in (DECODE, EXTEND, LONG)
        for case in in_types(
            replace(
                batch,
                name=f"{batch.name}, everything",
                page_size=4,
                sliding_window=6,
                logit_cap=2.0,
                sinks=(0.5, -1.0, 3.0),
                num_qo_heads=6,
                head_dim=80,
                scale=2.7,
            ),
            torch.float32,
            torch.float16,
        )
    ),
)
def everything_at_once(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "check_layer refuses the layers that run refuses, and no others: an engine asks when it starts.",
    tuple(
        replace(DECODE, name=name, dtype=torch.bfloat16, **extras)
        for name, extras in (
            ("plain", {}),
            ("window", {"sliding_window": 5}),
            ("chunks", {"attention_chunk": 8}),
            ("cap", {"logit_cap": 5.0}),
            ("sinks", {"sinks": SINKS}),
            ("scale", {"scale": 1.7}),
        )
    ),
)
def refused_at_the_start(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = AttentionBatch(case)
    is_refused = run_or_refuse(impl, batch) is None
    backend = impl(batch.req_to_token_pool, batch.kv_pool)
    if is_refused:
        expect_raises(
            f"check_layer of a layer with {case.name}", ValueError, backend.check_layer, batch.layer
        )
    else:
        backend.check_layer(batch.layer)


@contract("Query heads that the KV heads do not divide are a ValueError.", EXAMPLE)
def heads_that_do_not_divide(impl: type[AttentionBackend], case: Case) -> None:
    batch = AttentionBatch(AttentionCase("4 heads", ((3, 1),), dtype=torch.bfloat16))
    batch.layer = replace(batch.layer, num_kv_heads=3)
    expect_raises("4 query heads on 3 KV heads", ValueError, batch.run, impl)
