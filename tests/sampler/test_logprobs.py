import math

import numpy as np
import pytest
import torch

from diptych.shared.sampling.logprobs import (
    logprobs_of,
    ranked_logprobs_of,
    sort_descending,
    to_token_logprobs,
)
from diptych.shared.types import LogprobsOutput, TokenLogprob

# float32 keeps 24 bits; a log-probability here is at most 30 in size and goes through a sum of 1,000 terms
TOLERANCE = 1e-5


def float64_logprobs(logits: torch.Tensor) -> np.ndarray:
    x = logits.double().numpy()
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def test_values_agree_with_float64() -> None:
    logits = torch.randn(6, 1000) * 5
    ids = torch.tensor([0, 999, 5, 6, 7, 8])
    output = logprobs_of(logits, ids, num_top=4)
    expected = float64_logprobs(logits)
    np.testing.assert_allclose(output.token_logprobs, expected[range(6), ids], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        output.top_logprobs, -np.sort(-expected, axis=-1)[:, :4], rtol=0, atol=TOLERANCE
    )
    np.testing.assert_array_equal(output.top_ids, np.argsort(-expected, axis=-1)[:, :4])
    assert output.top_ids.dtype == torch.int64


def test_ties_are_listed_lowest_id_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5])
    output = logprobs_of(logits, torch.tensor([0, 0]), num_top=4)
    assert output.top_ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_ranks_are_places_in_the_order_of_the_best() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, -math.inf]] * 5, dtype=torch.bfloat16)
    output = ranked_logprobs_of(logits, torch.arange(5), num_top=5)
    assert output.token_ranks.tolist() == [3, 1, 2, 4, 5]
    for found in to_token_logprobs(range(5), output):
        assert found.rank is not None
        assert found.top[found.rank - 1] == (found.token_id, found.logprob)


def test_no_alternative_one_and_more_than_there_are() -> None:
    logits = torch.zeros(2, 3)
    assert logprobs_of(logits, torch.tensor([0, 1]), 0).top_ids.shape == (2, 0)
    assert logprobs_of(logits, torch.tensor([0, 1]), 1).top_ids.tolist() == [[0], [0]]
    assert logprobs_of(logits, torch.tensor([0, 1]), 9).top_ids.shape == (2, 3)


def test_banned_tokens_have_minus_infinity_and_no_token_nan() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]] * 3)
    output = logprobs_of(logits, torch.tensor([0, 1, -1]), 3)
    assert output.token_logprobs[0] == pytest.approx(-math.log(2), abs=TOLERANCE)
    assert output.token_logprobs[1] == -math.inf
    assert output.token_logprobs[2].isnan()
    assert output.top_logprobs[0].tolist() == pytest.approx([-math.log(2)] * 2 + [-math.inf])


def test_conversion_for_answers() -> None:
    output = LogprobsOutput(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([[-0.5, -1.0], [-0.25, -2.0]]),
        torch.tensor([[3, 4], [5, 6]]),
    )
    assert to_token_logprobs([4, 6], output) == [
        TokenLogprob(4, -1.0, ((3, -0.5), (4, -1.0))),
        TokenLogprob(6, -2.0, ((5, -0.25), (6, -2.0))),
    ]
    without = LogprobsOutput(output.token_logprobs, torch.empty(2, 0), torch.empty(2, 0, dtype=torch.int64))
    assert to_token_logprobs([4, 6], without) == [TokenLogprob(4, -1.0), TokenLogprob(6, -2.0)]
    assert to_token_logprobs([4, 6], None) == []


VALUES = [
    [1.0, 3.0, 3.0, -2.0, 0.0, -0.0, 3.0, -math.inf],
    [0.0, -0.0, 0.0, -0.0, math.inf, -1e-45, 1e-45, -3e38],
    [-5.0] * 8,
]


@pytest.mark.parametrize("num", [None, 1, 3, 8, 20])
def test_ties_come_lowest_index_first(num: int | None) -> None:
    values = torch.tensor(VALUES)
    ordered, indices = sort_descending(values, num)
    for row, row_values, row_indices in zip(values.tolist(), ordered.tolist(), indices.tolist()):
        expected = sorted(range(8), key=lambda i: (-row[i], i))[:num]
        assert row_indices == expected
        assert row_values == [row[i] for i in expected]
