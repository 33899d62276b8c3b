"""Requests, batches and exact distributions for the sampler's tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from scipy import stats

from shared.sampling_batch import make_sampling_batch_info
from shared.types import Req, SamplingBatchInfo, SamplingParams

ALPHA = 1e-4
"""A correct sampler fails a test once in 10,000 seeds (the seeds are fixed). With NUM_DRAWS draws over ten
tokens, a distribution whose probabilities are off by 4 % each is found with a probability above 0.99."""
NUM_DRAWS = 40_000


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


def make_info(reqs: Sequence[Req], vocab_size: int, **kwargs: Any) -> SamplingBatchInfo:
    return make_sampling_batch_info(reqs, vocab_size, "cpu", **kwargs)


def repeat_row(info: SamplingBatchInfo, seeds: torch.Tensor) -> SamplingBatchInfo:
    """A batch of one row -> the same row with each of the seeds."""
    changes = {}
    for field in fields(info):
        value = getattr(info, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.expand(len(seeds), *value.shape[1:])
    return replace(info, **{**changes, "seeds": seeds})


def exact_distribution(logits: Sequence[float], req: Req) -> np.ndarray:
    """The contract once more, in float64 and in loops, sharing no code with the samplers."""
    params = req.sampling_params
    logits = [float(x) for x in logits]
    seen = set(req.origin_input_ids) | set(req.output_ids)
    for i in range(len(logits)):
        count = req.output_ids.count(i)
        if i in seen:
            r = params.repetition_penalty
            logits[i] = logits[i] / r if logits[i] > 0 else logits[i] * r
        logits[i] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        logits[i] += params.logit_bias.get(i, 0.0)
        if len(req.output_ids) < params.min_new_tokens and i in req.eos_token_ids:
            logits[i] = -math.inf
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept, before = [], 0.0
    for rank, i in enumerate(order):
        in_top_k = params.top_k == -1 or rank < params.top_k
        in_top_p = params.top_p == 1.0 or before < params.top_p
        if in_top_k and in_top_p and p[i] >= params.min_p * max(p):
            kept.append(i)
        before += p[i]
    result = np.zeros(len(p))
    result[kept] = [p[i] for i in kept]
    return result / result.sum()


def draw_many(sampler: Any, logits: Sequence[float], req: Req, num_draws: int = NUM_DRAWS) -> np.ndarray:
    """`num_draws` tokens, with consecutive seeds and positions that repeat: the hash must part them."""
    rows = torch.arange(num_draws)
    info = repeat_row(make_info([req], len(logits)), seeds=rows // 4)
    batch = torch.tensor(logits, dtype=torch.float32).expand(num_draws, -1)
    return sampler.sample(batch, info, positions=rows % 4).next_token_ids.numpy()


def p_value(ids: np.ndarray, expected: np.ndarray) -> float:
    """Of the chi-square test; 0 if a token was drawn that cannot be."""
    observed = np.bincount(ids, minlength=len(expected))
    possible = expected > 0
    if observed[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    assert (expected[possible] * len(ids) >= 5).all(), "too few draws for a chi-square test"
    return float(stats.chisquare(observed[possible], expected[possible] * len(ids)).pvalue)
