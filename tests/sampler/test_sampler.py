"""The reference's sampler, beyond the contract that `tests/conformance` holds every sampler to."""

import math

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from diptych.reference.sampler import Sampler, apply_penalties, filter_mask
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.tools.conformance.oracles.sampling_oracle import ADJUSTED, KINDS
from tests.sampler.make import make_info, make_req


def test_top_p_of_one_keeps_what_a_rounded_sum_would_lose() -> None:
    info = make_info([make_req(top_p=1.0, min_p=1e-30)], 2)
    ordered = torch.tensor([[0.0, -60.0]])
    total = ordered.to(torch.float64).exp().sum(dim=-1)
    assert total == 1.0
    assert filter_mask(ordered, info).tolist() == [[True, True]]


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_type_are_read_as_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn(8, 100) * 4).to(dtype)
    info = make_info([kind.req(seed=i) for i, kind in enumerate(KINDS)], 100)
    positions = torch.arange(8)
    assert torch.equal(
        Sampler().sample(logits, info, positions).next_token_ids,
        Sampler().sample(logits.float(), info, positions).next_token_ids,
    )


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens() -> None:
    """Exactly: everything that decides is an integer, or float64 away from a rounding boundary."""
    logits = torch.randn(256, 5000) * 3
    logits[:, 100:200] = logits[:, 200:300]  # ties
    logits[17, 5] = math.nan
    asks = [*KINDS, *ADJUSTED]
    reqs = [asks[i % len(asks)].req(seed=i, return_logprob=True, top_logprobs_num=5) for i in range(256)]
    positions = torch.arange(256)
    outputs = [
        Sampler().sample(
            logits.to(device), make_sampling_batch_info(reqs, 5000, device), positions.to(device)
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


@pytest.mark.parametrize("top_p", [1e-20, 1e-38, 1e-46, 1e-300, 5e-324])
def test_a_top_p_that_float32_rounds_to_zero_keeps_the_likeliest_token(top_p: float) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    info = make_info([make_req(top_p=top_p, seed=row) for row in range(3)], 300)
    found = Sampler().sample(logits, info, torch.arange(3))
    assert found.next_token_ids.tolist() == logits.argmax(dim=-1).tolist()
