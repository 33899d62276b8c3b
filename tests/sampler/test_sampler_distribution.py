"""What is drawn follows the exact distribution, whatever the parameters."""

import numpy as np
import pytest
import torch
from scipy import stats

from shared.interfaces.sampler import Sampler
from shared.types import Req
from tests.sampler.make import ALPHA, draw_many, exact_distribution, make_info, make_req, p_value, repeat_row

LOGITS = [1.0, -0.5, 0.3, 2.0, 1.0, -1.2, 0.3, 0.0, 1.7, -0.1]
PROMPT, OUTPUT = [3, 8, 8], [4, 4, 4, 0, 3]

CASES = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.4},
    "top-k": {"top_k": 4},
    "top-k within a tie": {"top_k": 3},
    "top-k beyond the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.7},
    "top-p within a tie": {"top_p": 0.45},
    "top-p keeps one": {"top_p": 0.01},
    "min-p": {"min_p": 0.25},
    "top-k and top-p": {"top_k": 5, "top_p": 0.8},
    "all filters, cold": {"temperature": 0.7, "top_k": 8, "top_p": 0.95, "min_p": 0.05},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.5},
    "repetition below one": {"repetition_penalty": 0.7},
    "all penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {1: 2.5, 3: -2.0, 7: float("-inf")}},
    "end tokens banned": {"min_new_tokens": 6},
    "everything": {
        "temperature": 0.8,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.02,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 2.0},
        "min_new_tokens": 6,
    },
}


def request(**params: object) -> Req:
    return make_req(PROMPT, OUTPUT, eos=[8], **params)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_draws_follow_the_exact_distribution(sampler: Sampler, params: dict) -> None:
    req = request(**params)
    ids = draw_many(sampler, LOGITS, req)
    assert p_value(ids, exact_distribution(LOGITS, req)) > ALPHA


def test_the_test_tells_neighbouring_definitions_apart(sampler: Sampler) -> None:
    """Draws with a slightly different parameter are recognised as wrong."""
    for drawn, expected in [
        ({"temperature": 1.05}, {}),
        ({"top_k": 4}, {"top_k": 5}),
        ({"top_p": 0.7}, {"top_p": 0.6}),
        ({"min_p": 0.25}, {"min_p": 0.15}),
        ({"frequency_penalty": 0.6}, {"frequency_penalty": 0.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.4}),
    ]:
        ids = draw_many(sampler, LOGITS, request(**drawn))
        assert p_value(ids, exact_distribution(LOGITS, request(**expected))) < ALPHA, drawn


def test_rows_of_different_kinds_in_one_batch_follow_their_own_distribution(sampler: Sampler) -> None:
    kinds = [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.25}, {"temperature": 0.7}]
    num_rows = 20_000 * len(kinds)
    seeds = torch.arange(num_rows) // len(kinds)
    reqs = [request(**kind) for kind in kinds]
    info = make_info(reqs * 20_000, len(LOGITS))
    info.seeds.copy_(seeds)
    logits = torch.tensor(LOGITS).expand(num_rows, -1)
    ids = sampler.sample(logits, info, torch.zeros(num_rows, dtype=torch.int64)).next_token_ids.numpy()
    assert (ids[:: len(kinds)] == 3).all()
    for i, req in list(enumerate(reqs))[1:]:
        assert p_value(ids[i :: len(kinds)], exact_distribution(LOGITS, req)) > ALPHA, kinds[i]


@pytest.mark.parametrize("stepped", ["seed", "position"])
def test_successive_draws_are_independent(sampler: Sampler, stepped: str) -> None:
    """The tokens at consecutive positions of a request, and those of consecutive seeds."""
    n, zeros = torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64)
    seeds, positions = (n, zeros) if stepped == "seed" else (zeros, n)
    info = repeat_row(make_info([request(temperature=2.0)], len(LOGITS)), seeds)
    ids = sampler.sample(torch.tensor(LOGITS).expand(len(n), -1), info, positions).next_token_ids.numpy()
    pairs = np.bincount(ids[0::2] * len(LOGITS) + ids[1::2], minlength=len(LOGITS) ** 2)
    assert stats.chi2_contingency(pairs.reshape(len(LOGITS), -1)).pvalue > ALPHA
