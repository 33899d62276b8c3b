import math

import numpy as np
import pytest
import torch

from shared.interfaces.sampler import Sampler
from shared.logprobs import logprobs_of, to_token_logprobs
from shared.types import LogprobsOutput, TokenLogprob
from tests.sampler.make import make_info, make_req

# float32 keeps 24 bits; a log-probability here is at most 30 in size and goes through a sum of 1,000 terms
TOLERANCE = 1e-5


def float64_logprobs(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    x = logits.double().numpy() / temperature
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


def test_no_alternatives_and_more_than_there_are() -> None:
    logits = torch.zeros(2, 3)
    assert logprobs_of(logits, torch.tensor([0, 1]), 0).top_ids.shape == (2, 0)
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
    assert to_token_logprobs(torch.tensor([4, 6]), output) == [
        TokenLogprob(4, -1.0, ((3, -0.5), (4, -1.0))),
        TokenLogprob(6, -2.0, ((5, -0.25), (6, -2.0))),
    ]
    without = LogprobsOutput(output.token_logprobs, torch.empty(2, 0), torch.empty(2, 0, dtype=torch.int64))
    assert to_token_logprobs(torch.tensor([4, 6]), without) == [TokenLogprob(4, -1.0), TokenLogprob(6, -2.0)]
    assert to_token_logprobs(torch.tensor([4, 6]), None) == []


def test_the_sampler_reports_them_after_bias_and_temperature_before_filters(sampler: Sampler) -> None:
    logits = torch.randn(3, 100) * 3
    reqs = [
        make_req(temperature=0.5, top_k=5, top_p=0.7, return_logprob=True, top_logprobs_num=3),
        make_req(temperature=0.0, return_logprob=True),
        make_req(seed=2, logit_bias={int(logits[2].argmax()): -5.0}, frequency_penalty=1.0, output=[1, 1]),
    ]
    output = sampler.sample(logits, make_info(reqs, 100), torch.arange(3))
    assert output.logprobs is not None
    adjusted = logits.clone()
    adjusted[2, logits[2].argmax()] -= 5.0
    adjusted[2, 1] -= 2.0
    for row, temperature in enumerate((0.5, 1.0, 1.0)):  # greedy: as is
        expected = float64_logprobs(adjusted[row], temperature)
        token_id = int(output.next_token_ids[row])
        assert output.logprobs.token_logprobs[row].item() == pytest.approx(expected[token_id], abs=TOLERANCE)
        assert output.logprobs.top_ids[row].tolist() == np.argsort(-expected, kind="stable")[:3].tolist()
    assert output.logprobs.top_ids[1, 0] == output.next_token_ids[1]


def test_log_probabilities_do_not_change_what_is_sampled(sampler: Sampler) -> None:
    logits = torch.randn(20, 200)
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.5}):
        plain = make_info([make_req(seed=i, **params) for i in range(20)], 200)
        asked = make_info([make_req(seed=i, return_logprob=True, **params) for i in range(20)], 200)
        positions = torch.arange(20)
        with_logprobs = sampler.sample(logits, asked, positions)
        without = sampler.sample(logits, plain, positions)
        assert without.logprobs is None
        assert torch.equal(with_logprobs.next_token_ids, without.next_token_ids)


def test_a_bad_row_does_not_spoil_the_others(sampler: Sampler) -> None:
    logits = torch.randn(3, 10)
    logits[1, 4] = math.nan
    reqs = [make_req(seed=i, return_logprob=True, top_logprobs_num=2) for i in range(3)]
    output = sampler.sample(logits, make_info(reqs, 10), torch.arange(3))
    assert output.next_token_ids[1] == -1
    for row in (0, 2):
        token_id = int(output.next_token_ids[row])
        expected = float64_logprobs(logits[row])
        assert output.logprobs.token_logprobs[row].item() == pytest.approx(expected[token_id], abs=TOLERANCE)
