"""Extend attention beyond its contract: requests without new tokens, tiles of any size, plans for graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.optimized.attention.triton import TritonAttention
from diptych.optimized.kernels.attention import extend_attention
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionBatch, AttentionCase
from diptych.shared.types import ForwardMode
from tests.kernels.fast_grid import fast_grid


@pytest.mark.parametrize("mask", ["causal", "random"])
def test_requests_without_new_tokens(mask: Any) -> None:
    batch = AttentionBatch(AttentionCase("", ((13, 1), (10, 21), (1, 60), (0, 5)), mask=mask))
    expected = batch.expected()
    for i in (0, 2):
        if mask != "causal":
            batch.masks[i] = torch.zeros(0, sum(batch.case.requests[i]), dtype=torch.bool)
    spans = [(0, 14, 14), (1, 10, 31), (2, 61, 61), (3, 0, 5)]
    batch.forward_batch = batch.forward_batch_of(spans, batch.case.forward_mode)
    rows = batch.rows_of(spans)
    batch.q = batch.q[rows]
    expect_close("output", batch.run(TritonAttention), expected[rows], tolerance("attention", torch.float32))


@fast_grid(
    tile={f"{m} rows, {n} keys": (m, n) for m, n in ((16, 16), (16, 64), (64, 16), (128, 128))},
    options={
        "plain": {},
        "7 heads of 80": {
            "num_qo_heads": 7,
            "num_kv_heads": 1,
            "head_dim": 80,
            "page_size": 16,
            "dtype": torch.bfloat16,
        },
        "extras": {"sliding_window": 20, "sinks": (0.5, 3.0), "logit_cap": 5.0},
        "mask and window": {"mask": "random", "sliding_window": 40},
    },
)
def test_tiles_of_any_size(
    tile: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a GPU uses, and smaller ones, which have more borders."""
    sizes = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(extend_attention, "_tile", lambda *_: sizes)
    requests = ((0, 1), (30, 17), (16, 16), (15, 33), (70, 3))
    batch = AttentionBatch(AttentionCase("", requests, **options))
    batch.expect(batch.run(TritonAttention))


def test_a_decode_step_may_be_run_as_an_extension() -> None:
    batch = AttentionBatch(AttentionCase("", ((70, 1), (0, 1), (15, 1))))
    batch.forward_batch = replace(batch.forward_batch, forward_mode=ForwardMode.MIXED)
    batch.expect(batch.run(TritonAttention))


@pytest.mark.parametrize("requests", [((40, 6), (9, 6)), ((0, 6), (0, 6))])
def test_a_plan_for_graphs_follows_its_buffers(requests: tuple[tuple[int, int], ...]) -> None:
    """Verifying drafts: lengths and masks come after the plan, numbers of drafts before."""
    batch = AttentionBatch(AttentionCase("", requests, mask="tree"))
    real, backend = batch.forward_batch, batch.backend(TritonAttention)
    names = ("req_pool_indices", "seq_lens", "custom_mask")
    buffers = replace(real, **{name: torch.ones_like(getattr(real, name)) for name in names})
    plan = backend.plan_for_graph(buffers, 100)
    for name in names:
        getattr(buffers, name).copy_(getattr(real, name))
    backend.replan(plan, buffers)
    batch.expect(batch.run_planned(backend, plan))
