import math
from typing import Any

import numpy as np
import pytest
import torch

from diptych.shared.sampling.bans import bans_every_token
from diptych.shared.sampling.processors import apply_processors
from diptych.shared.sampling.sampling_batch import derive_seed
from diptych.shared.types import SamplingBatchInfo
from tests.sampler.make import make_info, make_req

OPTIONAL = (
    "logit_bias",
    "banned",
    "vocab_mask",
    "output_counts",
    "prompt_mask",
    "frequency_penalties",
    "presence_penalties",
    "repetition_penalties",
)


def present(info: SamplingBatchInfo) -> set[str]:
    return {name for name in OPTIONAL if getattr(info, name) is not None}


def test_plain_requests_take_no_tensor_of_vocabulary_size() -> None:
    info = make_info([make_req(seed=3), make_req(seed=-4, temperature=0.5)], 100)
    assert present(info) == set()
    assert info.temperatures.tolist() == [1.0, 0.5]
    assert info.seeds.tolist() == [3, -4]
    assert info.top_ks.tolist() == [100, 100]
    assert not info.needs_filter
    assert not info.is_all_greedy


def test_types_and_values_of_the_row_tensors() -> None:
    reqs = [
        make_req(temperature=0.0, top_p=0.5, min_p=0.5, top_k=7),
        make_req(top_p=0.5, min_p=0.25, top_k=7),
        make_req(top_k=1000),
    ]
    info = make_info(reqs, 100)
    assert info.temperatures.tolist() == [1.0, 1.0, 1.0]
    assert info.top_ks.tolist() == [1, 7, 100]
    assert info.top_ps.tolist() == [1.0, 0.5, 1.0]
    assert info.min_ps.tolist() == [0.0, 0.25, 0.0]
    assert info.is_greedy.tolist() == [True, False, False]
    types = {
        name: getattr(info, name).dtype for name in ("temperatures", "top_ps", "min_ps", "top_ks", "seeds")
    }
    assert types == dict.fromkeys(("temperatures", "top_ps", "min_ps"), torch.float32) | dict.fromkeys(
        ("top_ks", "seeds"), torch.int64
    )
    assert info.is_greedy.dtype == torch.bool


@pytest.mark.parametrize(
    ("params", "needs_filter"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_p": 0.5}, False),
        ({"top_k": 100}, False),
        ({"top_k": 99}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
    ],
)
def test_needs_filter(params: dict, needs_filter: bool) -> None:
    assert make_info([make_req(), make_req(**params)], 100).needs_filter == needs_filter


def test_flags_follow_the_batch_as_it_is_now() -> None:
    greedy, random = make_req(temperature=0.0), make_req(top_k=5)
    assert make_info([greedy, greedy], 100).is_all_greedy
    mixed = make_info([greedy, random], 100)
    assert not mixed.is_all_greedy
    assert mixed.needs_filter
    assert make_info([greedy], 100).is_all_greedy


def test_stop_tokens_are_banned_until_min_new_tokens_exist() -> None:
    for num_output, is_banned in ((0, True), (2, True), (3, False)):
        req = make_req(output=[5] * num_output, eos=[1, 2, 5000], min_new_tokens=3, stop_token_ids=(7,))
        info = make_info([make_req(), req], 10)
        if is_banned:
            assert info.banned.nonzero().tolist() == [[1, 1], [1, 2], [1, 7]]
        else:
            assert info.banned is None


def test_ignore_eos_leaves_nothing_to_ban() -> None:
    req = make_req(eos=[1], min_new_tokens=3, stop_token_ids=(7,), ignore_eos=True)
    assert make_info([req], 10).banned is None


def test_bias_is_added_and_minus_infinity_is_a_ban() -> None:
    info = make_info([make_req(), make_req(logit_bias={3: 1.5, 4: -math.inf, 5: -2.0})], 6)
    assert info.logit_bias.tolist() == [[0.0] * 6, [0.0, 0.0, 0.0, 1.5, 0.0, -2.0]]
    assert info.banned.nonzero().tolist() == [[1, 4]]


def test_allowed_tokens_leave_out_all_others_and_stay_banned_otherwise() -> None:
    limited = make_req(allowed_token_ids=(1, 3, 4, 99), logit_bias={3: -math.inf}, eos=[4], min_new_tokens=1)
    info = make_info([make_req(), limited], 6)
    assert [row.nonzero().flatten().tolist() for row in ~info.banned] == [[0, 1, 2, 3, 4, 5], [1]]
    assert not bans_every_token(limited, 0, 6)
    assert bans_every_token(make_req(allowed_token_ids=(4,), eos=[4], min_new_tokens=1), 0, 6)


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], [5]), ([1], [5]), ([1, 2], [3, 5]), ([1, 2, 2], [5]), ([2, 1], [5]), ([3, 1, 2], [0, 3, 5])],
)
def test_the_last_token_of_a_bad_word_is_banned(output: list[int], banned: list[int]) -> None:
    req = make_req(output=output, bad_word_ids=((1, 2, 3), (3, 1, 2, 0), (5,), (2, 99)))
    info = make_info([req, make_req()], 6)
    assert info.banned[0].nonzero().flatten().tolist() == banned
    assert not info.banned[1].any()
    assert req.needs_output
    assert not make_req(bad_word_ids=((5,),)).needs_output  # a ban for ever needs no output


def test_tokens_that_a_request_asks_for_are_a_row() -> None:
    asks: list[dict[str, Any]] = [{}, {"token_ids_logprob": (7, 3)}, {"token_ids_logprob": (5,)}]
    reqs = [make_req(return_logprob=True, **ask) for ask in asks]
    assert make_info(reqs, 10).asked_ids.tolist() == [[-1, -1], [7, 3], [5, -1]]
    assert make_info(reqs[:1], 10).asked_ids is None


def test_penalties_count_the_requests_own_tokens() -> None:
    reqs = [
        make_req([0, 0, 1], [2, 2, 3], frequency_penalty=0.5),
        make_req([0, 0, 1], [2, 2, 3]),
        make_req([0, 0, 1], [4], repetition_penalty=1.5),
    ]
    info = make_info(reqs, 5)
    assert present(info) == {"output_counts", "prompt_mask", "frequency_penalties", "repetition_penalties"}
    assert info.output_counts.tolist() == [[0, 0, 2, 1, 0], [0] * 5, [0, 0, 0, 0, 1]]
    assert info.output_counts.dtype == torch.int32
    assert info.prompt_mask.tolist() == [[False] * 5, [False] * 5, [True, True, False, False, False]]
    assert info.frequency_penalties.tolist() == [0.5, 0.0, 0.0]
    assert info.repetition_penalties.tolist() == [1.0, 1.0, 1.5]


def test_padding_ids_of_a_prompt_are_not_penalised() -> None:
    """The head has more rows than there are tokens. An id of such a row has no column: it counts nowhere, in
    particular not in the columns of the next request."""
    reqs = [make_req([8, 9, 2], [9], repetition_penalty=1.5) for _ in range(2)]
    info = make_info(reqs, 8)
    assert info.prompt_mask.nonzero().tolist() == [[0, 2], [1, 2]]
    assert info.output_counts.sum() == 0


def test_penalties_survive_a_retraction() -> None:
    req = make_req([0, 1], [2, 2, 3], frequency_penalty=0.5, repetition_penalty=1.5)
    before = make_info([req], 5)
    req.reset_for_retraction()
    after = make_info([req], 5)
    for name in ("output_counts", "prompt_mask", "frequency_penalties", "repetition_penalties"):
        assert torch.equal(getattr(before, name), getattr(after, name))


def test_most_alternatives_that_any_row_wants() -> None:
    reqs = [make_req(), make_req(return_logprob=True, top_logprobs_num=3)]
    info = make_info(reqs, 100)
    assert info.return_logprob
    assert info.num_top_logprobs == 3
    assert make_info([make_req(return_logprob=True, top_logprobs_num=300)], 100).num_top_logprobs == 100
    assert not make_info([make_req()], 100).return_logprob


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (torch.zeros(1, 5), r"\(1, 5\)"),
        (torch.zeros(5), r"\(5,\)"),
        ([[0.0] * 5] * 2, "list"),
        (None, "NoneType"),
    ],
    ids=["one row", "no rows", "a list", "nothing"],
)
def test_a_processor_that_returns_no_logits_is_refused(returned: object, named: str) -> None:
    """Also where it could be broadcast."""

    def processor(output_ids: object, logits: torch.Tensor) -> object:
        return returned

    reqs = [make_req(), make_req()]
    for req in reqs:
        req.logit_processor = processor
    with pytest.raises(ValueError, match=rf"must return logits of shape \(2, 5\), got {named}$"):
        apply_processors(torch.zeros(2, 5), make_info(reqs, 5))


def test_seeds_of_samples_are_distinct_and_repeatable() -> None:
    seeds = [derive_seed(seed, index) for seed in range(40) for index in range(50)]
    assert seeds == [derive_seed(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert seeds[::50] == list(range(40))  # sample 0 is the request itself
    for seed in (-(2**63), 2**63 - 1):
        assert -(2**63) <= derive_seed(seed, 1) < 2**63
    spread = np.array(seeds).reshape(40, 50)[:, 1:] / 2**63
    assert abs(spread.mean()) < 0.06  # uniform on [-1, 1): 4.6 standard deviations of 1,960 values
