"""The power of the contract's chi-square tests."""

import pytest

from diptych.reference.sampler import Sampler
from diptych.shared.tools.conformance.contracts.sampler.distribution import LOGITS, NUM_DRAWS
from diptych.shared.tools.conformance.oracles.chi_square import ALPHA, p_value
from diptych.shared.tools.conformance.oracles.sampling_oracle import Ask, draw_many, exact_distribution

TEXT = {"prompt": (3, 8, 8, 5), "output": (4, 4, 4, 0, 3)}


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ({"temperature": 1.05}, {}),
        ({"top_k": 4}, {"top_k": 5}),
        ({"top_p": 0.7}, {"top_p": 0.6}),
        ({"min_p": 0.25}, {"min_p": 0.15}),
        ({"frequency_penalty": 0.6}, {"frequency_penalty": 0.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.4}),
    ],
    ids=str,
)
def test_a_neighbouring_definition_is_distinguished(drawn: dict, expected: dict) -> None:
    """Draws with a slightly different parameter are recognised as wrong, those with the right one are not."""
    ids = draw_many(Sampler, LOGITS, Ask("", **drawn, **TEXT).req(), NUM_DRAWS)
    assert p_value(ids, exact_distribution(LOGITS, Ask("", **expected, **TEXT).req())) < ALPHA
    assert p_value(ids, exact_distribution(LOGITS, Ask("", **drawn, **TEXT).req())) > ALPHA
