"""Clauses of attention, third part: masks, with which speculative decoding verifies draft trees."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.contracts.attention.layers import SINKS
from diptych.shared.tools.conformance.oracles.attention_batches import (
    AttentionBatch,
    AttentionCase,
    expect_attention,
    run_or_refuse,
)

TREES = AttentionCase("trees", ((11, 7), (0, 7), (26, 7)), mask="tree")
LARGE_TREES = AttentionCase("large trees", ((130, 60), (17, 60)), mask="tree", seed=1)
COMPACT = (
    replace(TREES, name="trees, in a fixed shape", tail=7),
    replace(TREES, name="beams behind earlier ones", requests=((11, 7), (40, 7), (26, 7)), tail=16),
    replace(TREES, name="shorter than the mask", requests=((3, 4), (0, 4), (9, 4)), tail=8, page_size=4),
    replace(LARGE_TREES, name="large trees, in a fixed shape", tail=60, num_qo_heads=8, seed=2),
    replace(LARGE_TREES, name="a long prefix", requests=((1100, 5),), tail=5, page_size=16),
)
COMPACT_EXTRAS = (
    replace(COMPACT[0], name="cap", logit_cap=5.0),
    replace(COMPACT[0], name="window", sliding_window=9),
    replace(COMPACT[0], name="head_dim 80", head_dim=80),
)
BRANCHES = tuple(
    replace(case, name=f"{case.name}, {what}", **kind)
    for case in COMPACT
    for what, kind in (
        ("window 0", {"sliding_window": 0}),
        ("window 3", {"sliding_window": 3}),
        ("window 70, sinks", {"sliding_window": 70, "sinks": SINKS}),
        ("chunks of 4", {"attention_chunk": 4}),
        ("chunks of 64", {"attention_chunk": 64}),
    )
)
RAGGED = AttentionCase("ragged masks", ((12, 2), (1, 30), (150, 11), (0, 5)), mask="random")
BLIND = AttentionCase("blind rows", ((3, 4), (7, 2), (0, 3)), mask="blind")


def extras(case: AttentionCase) -> tuple[AttentionCase, ...]:
    """Cases with pages: plain, with a window and with sinks, in float32; once in bfloat16."""
    return (
        case,
        replace(case, name=f"{case.name}, page 4", page_size=4),
        replace(case, name=f"{case.name}, window 0", sliding_window=0),
        replace(case, name=f"{case.name}, window 9", sliding_window=9),
        replace(case, name=f"{case.name}, sinks", sinks=SINKS),
        replace(case, name=f"{case.name}, bfloat16, page 16", dtype=torch.bfloat16, page_size=16),
    )


@contract(
    "A tree of drafts: each sees what is cached, its ancestors and itself, and not its siblings.",
    (*extras(TREES), *extras(LARGE_TREES)),
)
def trees(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "A mask in a fixed shape says the same: all see what is in front of its columns, of these what it says.",
    (
        *COMPACT,
        *(replace(case, name=f"{case.name}, bfloat16", dtype=torch.bfloat16) for case in COMPACT),
        *(replace(case, name=f"{case.name}, sinks", sinks=SINKS) for case in COMPACT),
        *COMPACT_EXTRAS,
    ),
)
def fixed_shape(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "Windows and chunks of trees count along the branch: siblings have slots between, and take no place.",
    (
        *BRANCHES,
        *(replace(case, name=f"{case.name}, bfloat16", dtype=torch.bfloat16) for case in BRANCHES[:5]),
    ),
)
def windows_along_the_branch(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract("Any mask, row by row of each request in turn.", extras(RAGGED))
def any_mask(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract("A masked token that sees nothing gets zeros, with sinks too.", extras(BLIND))
def tokens_without_visible_keys(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch = case.make()
    output = run_or_refuse(impl, batch)
    if output is None:
        return
    batch.expect(output)
    is_blind = torch.cat([~mask.any(1) for mask in batch.masks if mask is not None])
    expect_equal("rows that see nothing", bool(output.cpu()[is_blind].any()), False)
    expect_true("the others see something", float(batch.expected()[~is_blind].abs().amax()) > 0)


@contract(
    "The mask of a tree without branches gives what no mask gives.",
    (
        AttentionCase("float32", ((8, 4), (16, 4), (0, 4)), mask="chain"),
        AttentionCase(
            "bfloat16, page 16", ((8, 4), (16, 4)), mask="chain", dtype=torch.bfloat16, page_size=16
        ),
    ),
)
def chain_is_causal(impl: type[AttentionBackend], case: AttentionCase) -> None:
    masked = case.make()
    causal = AttentionBatch(replace(case, mask="causal"))
    for batch in (masked, causal):
        output = run_or_refuse(impl, batch)
        if output is not None:
            causal.expect(output)
