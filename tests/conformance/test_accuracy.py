"""The built-in models answer held-out questions as well in every configuration as in the plainest."""

from __future__ import annotations

from functools import cache

import pytest

from shared.conformance.accuracy import (
    CONFIGURATIONS,
    LARGEST_LOSS,
    LOWEST_SCORE,
    NUM_QUESTIONS,
    exact_match,
)


@cache
def default_score(model: str, num_questions: int) -> float:
    return exact_match(model, num_questions, device="cpu")


MODELS = ("tiny-dense", "tiny-moe")
FAST = {(MODELS[name == "page 16"], name, NUM_QUESTIONS // 2) for name in CONFIGURATIONS}
"""The fast cut has each configuration on one of the models, with one question of each kind."""
WHOLE = {(model, name, NUM_QUESTIONS) for model in MODELS for name in CONFIGURATIONS}
CASES = [*sorted(FAST), *(pytest.param(*case, marks=pytest.mark.full) for case in sorted(WHOLE))]


@pytest.mark.parametrize(("model", "name", "num_questions"), CASES)
def test_a_configuration_loses_no_accuracy(model: str, name: str, num_questions: int) -> None:
    default = default_score(model, num_questions)
    assert default >= LOWEST_SCORE
    found = exact_match(model, num_questions, device="cpu", **CONFIGURATIONS[name])
    assert found >= LOWEST_SCORE
    assert abs(found - default) <= LARGEST_LOSS
