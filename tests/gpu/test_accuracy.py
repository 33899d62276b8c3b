"""Level L6: the optimized panel scores as well as the reference in every configuration."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.tools.conformance.whole_engine.accuracy import (
    CONFIGURATIONS,
    LARGEST_LOSS,
    LOWEST_SCORE,
    exact_match,
)

from . import harness
from .harness import MODELS, REFERENCE, attention_backends, computed_once, some_pairs, with_attention

pytestmark = pytest.mark.gpu

OPTIMIZED = {**harness.OPTIMIZED, "max_running_requests": 48, "cuda_graph_bs": (1, 4, 16, 48)}


@computed_once
def reference_score(model: str) -> float:
    return exact_match(model, **REFERENCE)


def expect_score(model: str, **flags: Any) -> None:
    """In bfloat16, the dtype of the checkpoints."""
    found = exact_match(model, **{**OPTIMIZED, **flags})
    assert found >= LOWEST_SCORE
    assert found >= reference_score(model) - LARGEST_LOSS


@pytest.mark.parametrize(("name", "model"), some_pairs([*CONFIGURATIONS, "graphs off"], MODELS, 1))
def test_a_configuration_loses_no_accuracy(name: str, model: str) -> None:
    flags = CONFIGURATIONS.get(name, {"disable_cuda_graph": True})
    expect_score(model, **with_attention("triton"), **flags)


@pytest.mark.parametrize(("backend", "model"), some_pairs(attention_backends(), MODELS, 1))
def test_a_backend_loses_no_accuracy(backend: str, model: str) -> None:
    expect_score(model, **with_attention(backend))
