"""The reference's attention beyond its contract, which tests/conformance holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.reference.attention import TorchAttention
from diptych.shared.tools.conformance.clauses.clause import clauses_in
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance
from diptych.shared.tools.conformance.contracts.attention import outputs as attention_outputs
from diptych.shared.tools.conformance.contracts.attention import ragged as attention_ragged
from diptych.shared.tools.conformance.oracles.attention_batches import (
    LAYER_ID,
    AttentionBatch,
    AttentionCase,
    expect_attention,
)
from diptych.shared.types import ForwardMode
from tests.conformance.mutants.attention_outputs import Lenient, Output
from tests.conformance.mutants.ragged_attention import Ragged
from tests.conformance.mutants.stepped_attention import SteppedAttention

FLOAT64 = Tolerance(1e-12, 1e-12, 1e-12, "nothing is computed below float64: sums of a few hundred products")
REQUESTS = {
    "decode": ((4, 1), (0, 1), (63, 1), (62, 1), (64, 1), (1, 1)),
    "extend": ((17, 3), (0, 7), (1, 32), (16, 1)),
}


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6, "logit_cap": 2.0, "sinks": (0.5, -1.0)}])
@pytest.mark.parametrize("requests", REQUESTS)
def test_float64_stays_float64(requests: str, options: dict[str, Any]) -> None:
    batch = AttentionBatch(AttentionCase(requests, REQUESTS[requests], dtype=torch.float64, **options))
    expect_close("output", batch.run(TorchAttention), batch.expected(), FLOAT64)


def test_extreme_scores_in_float64() -> None:
    """Scores of +-1e4 are far beyond what exp() takes; the largest one wins."""
    batch = AttentionBatch(AttentionCase("", ((5, 1), (2, 1)), dtype=torch.float64, scale=1e4))
    output = batch.run(TorchAttention)
    assert torch.isfinite(output).all()
    for i, slots in enumerate(batch.slots):
        for h in range(4):
            scores = batch.kv_pool.k_buffer(LAYER_ID)[slots, h // 2] @ batch.q[i, h]
            best = batch.kv_pool.v_buffer(LAYER_ID)[slots[scores.argmax()], h // 2]
            torch.testing.assert_close(output[i, h], best)


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads", "head_dim"), [(7, 1, 40), (5, 5, 3), (1, 1, 1)])
@pytest.mark.parametrize("requests", REQUESTS)
def test_any_number_of_heads_of_any_size(
    requests: str, num_qo_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    expect_attention(TorchAttention, AttentionCase(requests, REQUESTS[requests], **heads))


def test_query_heads_that_kv_heads_do_not_divide_are_named() -> None:
    batch = AttentionBatch(AttentionCase("", ((3, 1),)))
    batch.layer = replace(batch.layer, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"4.*3"):
        batch.run(TorchAttention)


@pytest.mark.parametrize("mask", ["causal", "random"])
@pytest.mark.parametrize("sliding_window", [-1, 9])
def test_a_request_without_new_tokens(mask: Any, sliding_window: int) -> None:
    case = AttentionCase(
        "", ((13, 1), (10, 21), (1, 160)), mask=mask, sliding_window=sliding_window, head_dim=16
    )
    batch = AttentionBatch(case)
    expected = batch.expected()
    if mask != "causal":
        batch.masks[1] = torch.zeros(0, 31, dtype=torch.bool)
    spans = [(0, 13, 14), (1, 31, 31), (2, 1, 161)]
    batch.forward_batch = batch.forward_batch_of(spans, case.forward_mode)
    rows = batch.rows_of(spans)
    batch.q = batch.q[rows]
    expect_close("output", batch.run(TorchAttention), expected[rows], tolerance("attention", torch.float32))


def test_a_tree_that_is_a_chain_equals_the_causal_mask_to_the_bit() -> None:
    case = AttentionCase("", ((8, 4), (16, 4)), mask="chain")
    outputs = [AttentionBatch(replace(case, mask=mask)).run(TorchAttention) for mask in ("chain", "causal")]
    assert torch.equal(*outputs)


def test_the_attention_that_bugs_are_planted_in_is_right() -> None:
    verdicts = check_implementation(clauses_of("attention"), SteppedAttention, TorchAttention)
    assert [(v.clause.name, v.case.name) for v in verdicts if not v.holds] == []


@pytest.mark.parametrize("impl", [Output, Lenient])
def test_the_outputs_that_bugs_are_planted_in_are_right(impl: type[TorchAttention]) -> None:
    verdicts = check_implementation(clauses_in(attention_outputs), impl, TorchAttention)
    assert [(v.clause.name, v.case.name) for v in verdicts if not v.holds] == []


def test_the_plans_that_bugs_are_planted_in_are_right() -> None:
    verdicts = list(check_implementation(clauses_in(attention_ragged), Ragged, TorchAttention))
    assert len(verdicts) > 10
    assert [(v.clause.name, v.case.name) for v in verdicts if not v.holds] == []


def test_the_forward_mode_of_a_case() -> None:
    assert AttentionCase("", ()).forward_mode is ForwardMode.IDLE
    assert AttentionCase("", ((3, 1),)).forward_mode is ForwardMode.DECODE
    assert AttentionCase("", ((3, 1),), is_prefill=True).forward_mode is ForwardMode.EXTEND
    assert AttentionCase("", ((3, 1), (0, 2))).forward_mode is ForwardMode.MIXED
    assert AttentionCase("", ((3, 1),), mask="tree").forward_mode is ForwardMode.TARGET_VERIFY
