"""Requests and batches for the sampler's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.types import Req, SamplingBatchInfo, SamplingParams


def make_req(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    eos: Sequence[int] = (),
    **params: Any,
) -> Req:
    return Req(
        rid="r",
        origin_input_ids=list(prompt),
        sampling_params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=frozenset(eos),
        output_ids=list(output),
    )


def make_info(reqs: Sequence[Req], vocab_size: int) -> SamplingBatchInfo:
    return make_sampling_batch_info(reqs, vocab_size, "cpu")
