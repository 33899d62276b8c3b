"""The built-in models answer held-out questions as well in every configuration as in the plainest."""

from __future__ import annotations

from functools import cache

import pytest

from shared.conformance.accuracy import CONFIGURATIONS, LARGEST_LOSS, LOWEST_SCORE, exact_match


@cache
def default_score(model: str) -> float:
    return exact_match(model, device="cpu")


MODELS = ("tiny-dense", "tiny-moe")
CASES = [  # the fast cut has each configuration on one of the models
    pytest.param(model, name, marks=[] if number % 2 == i else pytest.mark.full)
    for number, name in enumerate(CONFIGURATIONS)
    for i, model in enumerate(MODELS)
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_configuration_loses_no_accuracy(model: str, name: str) -> None:
    assert default_score(model) >= LOWEST_SCORE
    found = exact_match(model, device="cpu", **CONFIGURATIONS[name])
    assert found >= LOWEST_SCORE
    assert abs(found - default_score(model)) <= LARGEST_LOSS
