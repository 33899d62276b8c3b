"""Clauses of attention, first part: every kind of batch, compared with dense attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, HALF_TYPES
from diptych.shared.tools.conformance.oracles.attention_batches import (
    AttentionCase,
    expect_attention,
    in_types,
)

DECODE = AttentionCase("decode", ((4, 1), (0, 1), (63, 1), (62, 1), (64, 1), (1, 1)))
EXTEND = AttentionCase("cached prefixes", ((17, 3), (0, 7), (1, 32), (16, 1)))
MIXED = AttentionCase("mixed", ((23, 17), (0, 21), (8, 1), (29, 1), (4, 1)))
PROMPT = AttentionCase("prompts", ((0, 1), (0, 7), (0, 19)))
BORDERS = (126, 127, 128, 129)
"""Lengths around the tiles that kernels work in."""


def paged(case: AttentionCase, *page_sizes: int) -> tuple[AttentionCase, ...]:
    return tuple(replace(case, name=f"{case.name}, page {p}", page_size=p) for p in page_sizes)


@contract(
    "Decode: one new token for each request, whatever the lengths.",
    tuple(
        case
        for batch in (
            DECODE,
            AttentionCase("one token", ((0, 1),)),
            AttentionCase("one request", ((36, 1),)),
            AttentionCase("equal lengths", ((8, 1), (8, 1), (8, 1))),
            AttentionCase("one far longer", ((2, 1), (1, 1), (259, 1), (3, 1), (2, 1))),
            AttentionCase("around 128", tuple((n, 1) for n in BORDERS)),
        )
        for paged_batch in paged(batch, 1, 4, 16)
        for case in in_types(paged_batch, torch.float32, torch.bfloat16)
    ),
)
def decode(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "Extend: prompts, with and without cached tokens, page borders and tile borders among them.",
    tuple(
        case
        for page_size in (1, 4, 16)
        for batch in (
            PROMPT,
            EXTEND,
            replace(EXTEND, name="one new token", requests=((17, 1), (5, 1)), is_prefill=True),
            AttentionCase(
                "page borders",
                tuple((max(page_size + i, 0), page_size + j) for i in (-1, 0, 1) for j in (0, 1)),
            ),
            AttentionCase("around 128 cached", tuple((n, 5) for n in BORDERS)),
            AttentionCase("around 128 new", tuple((3, n) for n in BORDERS[1:])),
            AttentionCase("longer than two tiles", ((40, 260),)),
        )
        for case in in_types(paged(batch, page_size)[0], torch.float32, torch.bfloat16)
    ),
)
def extend(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "Mixed: some requests extend, others decode.",
    tuple(case for batch in paged(MIXED, 1, 4, 16) for case in in_types(batch, *FLOAT_TYPES)),
)
def mixed(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


def with_heads(case: AttentionCase, num_qo_heads: int, num_kv_heads: int) -> AttentionCase:
    name = f"{case.name}, {num_qo_heads} heads read {num_kv_heads}"
    return replace(case, name=name, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)


@contract(
    "Query head h reads KV head h // (num_qo_heads // num_kv_heads).",
    tuple(
        case
        for batch in (DECODE, EXTEND)
        for heads in (
            (1, 1),
            (3, 3),
            (2, 1),
            (6, 2),
            (8, 2),
            (16, 4),
            (10, 2),
            (8, 1),
            (15, 3),
            (7, 1),
            (16, 2),
        )
        for case in in_types(with_heads(batch, *heads), torch.float32, torch.bfloat16)
    ),
)
def heads_in_groups(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "Every head_dim gives its own sums, also one that is no power of two.",
    tuple(
        case
        for batch in (DECODE, EXTEND)
        for head_dim in (16, 64, 80, 96, 128, 256)
        for case in in_types(
            replace(batch, name=f"{batch.name}, head_dim {head_dim}", head_dim=head_dim), *FLOAT_TYPES
        )
    ),
)
def head_dims(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "Scores, their softmax and its sum are float32 at least.",
    tuple(
        case
        for batch in (
            AttentionCase("sharp, decode", ((200, 1), (150, 1)), scale=10.0),
            AttentionCase("sharp, extend", ((90, 60),), scale=10.0),
            AttentionCase("1100 equal scores, decode", ((1100, 1),), scale=1e-3),
            AttentionCase("1100 equal scores, extend", ((1100, 4),), scale=1e-3),
        )
        for case in in_types(batch, *HALF_TYPES)
    ),
)
def accumulated_in_float32(impl: type[AttentionBackend], case: AttentionCase) -> None:
    """In half precision, scores of magnitude 20 and their weights are off by up to a tenth, and a sum of 1100
    ones stops at 256 (bfloat16) or rounds (float16)."""
    expect_attention(impl, case)


@contract(
    "Large scores neither overflow nor underflow: the largest is taken off first.",
    tuple(
        case
        for batch in (
            AttentionCase("decode", ((0, 1), (0, 1), (40, 1), (5, 1)), scale=50.0),
            AttentionCase("extend", ((3, 20), (0, 9)), scale=50.0),
        )
        for case in in_types(batch, *HALF_TYPES)
    ),
)
def extreme_scores(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)
