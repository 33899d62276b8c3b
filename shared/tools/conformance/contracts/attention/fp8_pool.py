"""Clauses of attention: pools that hold K and V in FP8, with scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.contracts.attention.batches import DECODE, EXTEND, MIXED
from diptych.shared.tools.conformance.oracles.attention_batches import (
    LAYER_ID,
    AttentionBatch,
    AttentionCase,
    expect_attention,
    in_types,
    or_refusal,
)
from diptych.shared.types.attention import KVScales

SCALES = KVScales(0.043, 0.7)
SPLIT = AttentionCase("keys in several parts", ((700, 1), (3, 1), (131, 1)))
TREE = AttentionCase("tree", ((37, 5), (140, 5)), mask="tree", tail=5)
EXTRAS: dict[str, Any] = {
    "page_size": 4,
    "sliding_window": 40,
    "logit_cap": 5.0,
    "sinks": (0.5, -1.0, 3.0),
    "num_qo_heads": 6,
    "head_dim": 80,
}


@contract(
    "In an FP8 pool K and V are what it holds times the layer's scales, neither of them a batch-mate's.",
    tuple(
        case
        for batch in (
            DECODE,
            SPLIT,
            EXTEND,
            MIXED,
            TREE,
            replace(TREE, name="tree, sinks and cap", sinks=(0.3, 2.0), logit_cap=3.0),
            replace(TREE, name="flat mask", tail=None),
            replace(DECODE, name="decode, extras", **EXTRAS),
            replace(EXTEND, name="cached prefixes, extras", **EXTRAS),
            replace(EXTEND, name="small K, large V", kv_scales=KVScales(1e-4, 300.0)),
            replace(SPLIT, name="keys in parts, page 16", page_size=16, num_qo_heads=8, head_dim=128),
        )
        for case in in_types(
            replace(batch, kv_scales=batch.kv_scales or SCALES), torch.float32, torch.bfloat16, torch.float16
        )
        if not (case.dtype == torch.float16 and case.kv_scales.v > 1)
    )
    + tuple(
        case
        for batch in (DECODE, EXTEND, MIXED, TREE, SPLIT)
        for case in in_types(
            replace(batch, name=f"{batch.name}, e5m2", kv_scales=SCALES, kv_dtype=torch.float8_e5m2),
            torch.float32,
            torch.bfloat16,
            torch.float16,
        )
    ),
)
def fp8_pool(impl: type[AttentionBackend], case: AttentionCase) -> None:
    expect_attention(impl, case)


@contract(
    "k and v given with an FP8 pool are not read: the pool has rounded them.",
    in_types(replace(EXTEND, name="cached prefixes", kv_scales=SCALES), torch.float32, torch.bfloat16),
)
def fp8_pool_not_given_k_and_v(impl: type[AttentionBackend], case: AttentionCase) -> None:
    batch, inputs = AttentionBatch(case), Inputs(seed=7)
    new = batch.forward_batch.out_cache_loc
    k, v = (inputs.normal(len(new), case.num_kv_heads, case.head_dim, dtype=case.dtype) for _ in range(2))
    batch.kv_pool.store(LAYER_ID, new, k, v)

    def run() -> torch.Tensor:
        backend = batch.backend(impl)
        return batch.run_planned(backend, backend.plan(batch.forward_batch), k=k, v=v)

    output = or_refusal(case, run)
    if output is not None:
        batch.expect(output)
