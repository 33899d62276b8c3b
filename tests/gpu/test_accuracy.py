"""Level L6: the optimized panel scores as well as the reference in every configuration."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from diptych.shared.tools.conformance.whole_engine.accuracy import (
    CONFIGURATIONS,
    LARGEST_LOSS,
    LOWEST_SCORE,
    exact_match,
)

from .harness import MODELS, REFERENCE, attention_backends, with_attention

pytestmark = pytest.mark.gpu

OPTIMIZED = {
    "device": "cuda",
    "panel": "optimized",
    "max_running_requests": 48,
    "cuda_graph_bs": (1, 4, 16, 48),
}


@cache
def reference_score(model: str) -> float:
    return exact_match(model, **REFERENCE)


def expect_score(model: str, **flags: Any) -> None:
    """In bfloat16, the dtype of the checkpoints."""
    found = exact_match(model, **{**OPTIMIZED, **flags})
    assert found >= LOWEST_SCORE
    assert found >= reference_score(model) - LARGEST_LOSS


@pytest.mark.parametrize("name", [*CONFIGURATIONS, "graphs off"])
@pytest.mark.parametrize("model", MODELS)
def test_a_configuration_loses_no_accuracy(model: str, name: str) -> None:
    flags = CONFIGURATIONS.get(name, {"disable_cuda_graph": True})
    expect_score(model, **with_attention("triton"), **flags)


@pytest.mark.parametrize("backend", attention_backends())
@pytest.mark.parametrize("model", MODELS)
def test_a_backend_loses_no_accuracy(model: str, backend: str) -> None:
    expect_score(model, **with_attention(backend))
