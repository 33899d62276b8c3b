"""The sampler's contract, clause by clause, where the result is exact."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from reference.sampler import apply_penalties, filter_mask
from shared.interfaces.sampler import Sampler
from shared.sampling_batch import make_sampling_batch_info
from tests.sampler.make import draw_many, exact_distribution, make_info, make_req

INF, NAN = math.inf, math.nan
KINDS = [  # one of each, for mixed batches
    {"temperature": 0.0},
    {"top_k": 1},
    {},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


def sample(sampler: Sampler, rows: list, reqs: list, positions: list | None = None, **changes) -> list[int]:
    logits = torch.tensor(rows, dtype=torch.float32)
    before = logits.clone()
    info = make_info(reqs, logits.shape[1], **changes)
    positions = torch.zeros(len(rows), dtype=torch.int64) if positions is None else torch.tensor(positions)
    ids = sampler.sample(logits, info, positions).next_token_ids
    assert torch.equal(logits, before) or logits.isnan().any(), "the logits were modified"
    assert ids.dtype == torch.int64
    return ids.tolist()


def kept(sampler: Sampler, p: list[float], **params) -> set[int]:
    """The tokens that come out at all, of distribution p."""
    return set(draw_many(sampler, np.log(p).tolist(), make_req(**params), num_draws=4_000).tolist())


# ---- greedy ----


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1e-7}, {"top_k": 1}])
def test_greedy_takes_the_lowest_id_on_ties(sampler: Sampler, params: dict) -> None:
    rows = [[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -3.0, -INF, -1.0], [-0.0, 0.0, -1.0, 0.0]]
    assert sample(sampler, rows, [make_req(**params)] * 4) == [1, 0, 0, 0]


def test_greedy_rows_of_a_mixed_batch_take_the_lowest_id_on_ties(sampler: Sampler) -> None:
    logits = torch.randint(0, 3, (8, 300)).float()
    reqs = [make_req(seed=i, **({"temperature": 0.0} if i % 2 else KINDS[i])) for i in range(8)]
    ids = sample(sampler, logits.tolist(), reqs)
    for i in range(1, 8, 2):
        assert ids[i] == logits[i].tolist().index(2.0)


def test_greedy_tells_apart_logits_that_softmax_does_not(sampler: Sampler) -> None:
    rows = [[1e-8, 2e-8, 0.0]] * 2  # exp(-1e-8) is 1 in float32
    assert sample(sampler, rows, [make_req(top_k=1), make_req()], [0, 0])[0] == 1


# ---- temperature ----


@pytest.mark.parametrize("temperature", [1e-7, 1e-6, 1e-4])
@pytest.mark.parametrize("offset", [0.0, 3e38, -3e38, 60000.0])
def test_a_temperature_near_zero_takes_the_maximum(
    sampler: Sampler, temperature: float, offset: float
) -> None:
    """Also where logit / temperature has no float32."""
    gap = max(1.0, abs(offset) / 1e4)  # representable beside the offset
    rows = [[offset - gap, offset, offset - 2 * gap]] * 50
    assert sample(sampler, rows, [make_req(temperature=temperature, seed=i) for i in range(50)]) == [1] * 50


def test_a_temperature_near_zero_still_shares_between_ties(sampler: Sampler) -> None:
    reqs = [make_req(temperature=1e-6, seed=i) for i in range(200)]
    ids = sample(sampler, [[4.0, 1.0, 4.0]] * 200, reqs)
    assert set(ids) == {0, 2}
    assert 60 < ids.count(0) < 140  # 5.6 standard deviations


# ---- filters: which tokens stay ----


def test_the_filters_are_joint(sampler: Sampler) -> None:
    """One after the other, top-p would see .5 / .8 = .625 >= .6 after top-k, and keep one token."""
    assert kept(sampler, [0.5, 0.3, 0.2], top_k=2, top_p=0.6) == {0, 1}


def test_top_p_keeps_the_crossing_token(sampler: Sampler) -> None:
    assert kept(sampler, [0.2, 0.5, 0.3], top_p=0.51) == {1, 2}
    assert kept(sampler, [0.2, 0.5, 0.3], top_p=0.49) == {1}
    assert kept(sampler, [0.25, 0.25, 0.25, 0.25], top_p=0.5) == {0, 1}  # .5 before the third: not < .5


def test_top_p_of_one_keeps_what_a_rounded_sum_would_lose() -> None:
    info = make_info([make_req(top_p=1.0, min_p=1e-30)], 2)
    ordered = torch.tensor([[0.0, -60.0]])
    total = ordered.to(torch.float64).exp().sum(dim=-1)
    assert total == 1.0
    assert filter_mask(ordered, total, info).tolist() == [[True, True]]


def test_ties_at_the_boundary_are_ordered_by_id(sampler: Sampler) -> None:
    p = [0.1, 0.2, 0.2, 0.2, 0.2, 0.1]
    assert kept(sampler, p, top_k=2) == {1, 2}
    assert kept(sampler, p, top_k=5) == {0, 1, 2, 3, 4}
    assert kept(sampler, p, top_p=0.41) == {1, 2, 3}
    assert kept(sampler, p, top_p=0.35, top_k=3) == {1, 2}


def test_min_p_is_relative_to_the_maximum_and_includes_equality(sampler: Sampler) -> None:
    assert kept(sampler, [0.5, 0.25, 0.15, 0.1], min_p=0.4) == {0, 1}
    assert kept(sampler, [0.4, 0.4, 0.2], min_p=1.0) == {0, 1}


@pytest.mark.parametrize("params", KINDS)
def test_one_row_alone_keeps_what_the_exact_definition_keeps(sampler: Sampler, params: dict) -> None:
    if params.get("temperature") == 0.0:
        params = {"top_k": 1}
    logits = [0.0, 2.0, 1.0, 2.0, -1.0, 0.5, 1.0, -0.5]
    expected = exact_distribution(logits, make_req(**params))
    found = set(draw_many(sampler, logits, make_req(**params), num_draws=8_000).tolist())
    assert found <= set(np.flatnonzero(expected))
    assert found >= set(np.flatnonzero(expected > 0.005))  # missed with a probability below 1e-17


# ---- seeds and batch-mates ----


def test_a_row_does_not_depend_on_its_batch_mates(sampler: Sampler) -> None:
    torch.manual_seed(1)
    n, vocab_size = 24, 500
    logits = torch.randn(n, vocab_size) * 3
    reqs = [make_req(seed=1000 + i, **KINDS[i % len(KINDS)]) for i in range(n)]
    for i in range(0, n, 3):  # some rows with more in their info
        reqs[i] = make_req(seed=1000 + i, frequency_penalty=0.5, output=[1, 2, 3], logit_bias={7: 2.0})
    positions = list(range(50, 50 + n))
    together = sample(sampler, logits.tolist(), reqs, positions)
    for i in range(n):
        assert sample(sampler, [logits[i].tolist()], [reqs[i]], [positions[i]]) == [together[i]]
    order = torch.randperm(n).tolist()
    permuted = sample(
        sampler, [logits[i].tolist() for i in order], [reqs[i] for i in order], [positions[i] for i in order]
    )
    assert permuted == [together[i] for i in order]


def test_noise_belongs_to_the_token_not_to_its_rank(sampler: Sampler) -> None:
    """A filter that keeps the winner does not change who wins."""
    torch.manual_seed(2)
    rows = (torch.randn(64, 200) * 2).tolist()
    plain = sample(sampler, rows, [make_req(seed=i) for i in range(64)])
    filtered = sample(sampler, rows, [make_req(seed=i, min_p=1e-9) for i in range(64)])
    assert plain == filtered


def test_seed_position_and_only_they_decide(sampler: Sampler) -> None:
    row = [0.0] * 50
    by_seed = sample(sampler, [row] * 40, [make_req(seed=i) for i in range(40)])
    by_position = sample(sampler, [row] * 40, [make_req(seed=5)] * 40, list(range(40)))
    assert len(set(by_seed)) > 15
    assert len(set(by_position)) > 15
    assert sample(sampler, [row] * 40, [make_req(seed=5)] * 40) == [by_seed[5]] * 40


def test_seeds_differ_in_all_64_bits(sampler: Sampler) -> None:
    seeds = [0] + [1 << bit for bit in range(63)] + [-(2**63), -1]
    ids = sample(sampler, [[0.0] * 5000] * len(seeds), [make_req(seed=s) for s in seeds])
    assert len(set(ids)) > 60


# ---- rows that are not numbers, or not finite ----


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0, 0.0], [0.0, 1.0, 9.0, NAN], [NAN] * 4, [-INF] * 4])
def test_a_bad_row_gets_minus_one_and_disturbs_nobody(sampler: Sampler, params: dict, bad: list) -> None:
    good = [[0.5, 1.0, 2.0, 1.5], [3.0, 1.0, 2.0, 1.5]]
    reqs = [make_req(seed=i, **params) for i in range(3)]
    alone = sample(sampler, good, [reqs[0], reqs[2]])
    assert sample(sampler, [good[0], bad, good[1]], reqs) == [alone[0], -1, alone[1]]
    assert sample(sampler, [bad], [reqs[1]]) == [-1]


def test_a_nan_is_found_behind_every_mask(sampler: Sampler) -> None:
    reqs = [make_req(temperature=0.0), make_req(temperature=0.0, logit_bias={0: -INF})]
    assert sample(sampler, [[1.0, 2.0, NAN], [NAN, 1.0, 2.0]], reqs) == [-1, -1]


def test_a_row_with_everything_banned_gets_minus_one(sampler: Sampler) -> None:
    bias = {0: -INF, 1: -INF}
    reqs = [make_req(logit_bias=bias), make_req(), make_req(temperature=0.0, logit_bias=bias)]
    ids = sample(sampler, [[1.0, 2.0]] * 3, reqs)
    assert ids[0] == ids[2] == -1
    assert ids[1] in (0, 1)


def test_an_infinite_logit_is_the_limit_of_a_large_one(sampler: Sampler) -> None:
    """The tokens that have it share all the probability; greedy takes the first of them."""
    row = [5.0, INF, 1.0, INF]
    reqs = [make_req(seed=i) for i in range(100)] + [make_req(seed=i, top_p=0.9, top_k=3) for i in range(100)]
    ids = sample(sampler, [row] * 200, reqs)
    assert set(ids[:100]) == set(ids[100:]) == {1, 3}
    assert sample(sampler, [row], [make_req(temperature=0.0)]) == [1]
    assert sample(sampler, [row], [make_req(logit_bias={1: -INF})]) == [3]


def test_padding_and_banned_ids_are_never_sampled(sampler: Sampler) -> None:
    for params in KINDS:
        reqs = [make_req(seed=i, **params) for i in range(200)]
        assert max(sample(sampler, [[-5.0, -6.0, -4.0, -INF, -INF]] * 200, reqs)) <= 2


def test_vocab_mask_bits(sampler: Sampler) -> None:
    vocab_size = 70  # two words and a bit
    allowed = {0, 31, 32, 63, 69}
    words = [sum(1 << (i % 32) for i in allowed if i // 32 == w) for w in range(3)]
    mask = torch.tensor([[w - 2**32 if w >= 2**31 else w for w in words], [-1, -1, -1]], dtype=torch.int32)
    info = replace(make_info([make_req(), make_req(temperature=0.0)], vocab_size), vocab_mask=mask)
    found = set()
    for position in range(200):
        logits = torch.zeros(2, vocab_size)
        logits[1, 33] = 1.0
        ids = sampler.sample(logits, info, torch.tensor([position, position])).next_token_ids.tolist()
        found.add(ids[0])
        assert ids[1] == 33
    assert found == allowed


# ---- penalties ----


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_that_of_hugging_face(penalty: float) -> None:
    logits = torch.randn(2, 50)
    prompt, output = [1, 2, 2, 30], [4, 4, 5]
    info = make_info([make_req(prompt, output, repetition_penalty=penalty), make_req(prompt, output)], 50)
    ids = torch.tensor([prompt + output])
    expected = RepetitionPenaltyLogitsProcessor(penalty=penalty)(ids, logits[:1].clone())
    found = apply_penalties(logits, info)
    assert torch.equal(found[:1], expected)
    assert torch.equal(found[1:], logits[1:])


def test_frequency_and_presence_count_the_output_only() -> None:
    req = make_req([1, 1], [2, 2, 3], frequency_penalty=0.5, presence_penalty=0.25)
    found = apply_penalties(torch.zeros(1, 5), make_info([req], 5))
    assert found.tolist() == [[0.0, 0.0, -1.25, -0.75, 0.0]]


def test_penalties_come_before_masks_and_bias_after(sampler: Sampler) -> None:
    """A bias on a penalised token is added in full; a banned token stays banned with a bias."""
    req = make_req([0], [], temperature=0.0, repetition_penalty=10.0, logit_bias={0: 3.0})
    assert sample(sampler, [[10.0, 3.5]], [req]) == [0]  # 10 / 10 + 3 = 4
    req = make_req([0], [], temperature=0.0, min_new_tokens=1, logit_bias={1: 100.0}, stop_token_ids=(1,))
    assert sample(sampler, [[1.0, 50.0, 0.0]], [req]) == [0]


def test_an_empty_batch(sampler: Sampler) -> None:
    output = sampler.sample(torch.zeros(0, 7), make_info([], 7), torch.zeros(0, dtype=torch.int64))
    assert output.next_token_ids.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_type_are_read_as_float32(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = (torch.randn(8, 100) * 4).to(dtype)
    info = make_info([make_req(seed=i, **kind) for i, kind in enumerate(KINDS)], 100)
    positions = torch.arange(8)
    assert torch.equal(
        sampler.sample(logits, info, positions).next_token_ids,
        sampler.sample(logits.float(), info, positions).next_token_ids,
    )


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens(sampler: Sampler) -> None:
    """Exactly: everything that decides is an integer, or float64 away from a rounding boundary."""
    logits = torch.randn(256, 5000) * 3
    logits[:, 100:200] = logits[:, 200:300]  # ties
    logits[17, 5] = NAN
    reqs = [
        make_req(
            [1, 2, 3],
            [4, 4, 5],
            seed=i,
            return_logprob=True,
            top_logprobs_num=5,
            **(
                {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}} if i % 3 else {}
            ),
            **KINDS[i % len(KINDS)],
        )
        for i in range(256)
    ]
    positions = torch.arange(256)
    outputs = [
        sampler.sample(
            logits.to(device),
            make_sampling_batch_info(reqs, 5000, device),
            positions.to(device),
        )
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(outputs[0].next_token_ids, outputs[1].next_token_ids.cpu())
    assert outputs[0].next_token_ids[17] == -1
    good = torch.arange(256) != 17
    assert torch.equal(outputs[0].logprobs.top_ids[good], outputs[1].logprobs.top_ids.cpu()[good])
    # one float32 logsumexp of 5,000 terms on either side
    torch.testing.assert_close(
        outputs[0].logprobs.token_logprobs[good],
        outputs[1].logprobs.token_logprobs.cpu()[good],
        rtol=0,
        atol=1e-5,
    )
