"""Sampling parameters of a batch, as tensors. Made anew for each step from the requests alone, so nothing
has to be merged or filtered, and nothing is lost when a request is retracted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from diptych.shared.sampling.bans import banned_tokens
from diptych.shared.sampling.logprobs import asked_ids_of
from diptych.shared.sampling.noise import hash_noise
from diptych.shared.sampling.processors import group_processors
from diptych.shared.to_device import copy_to_device, to_device
from diptych.shared.types import Req, SamplingBatchInfo, SamplingParams

MIN_TOP_P = 1e-20
"""It keeps the likeliest token alone, as every smaller value does. float32 would round those to 0, which
drops all tokens."""


def make_sampling_batch_info(
    reqs: Sequence[Req],
    vocab_size: int,
    device: torch.device | str,
    num_in_flight: Sequence[int] | None = None,
    reads_texts: bool = True,
) -> SamplingBatchInfo:
    """`vocab_size`: the columns of the logits, those that have a token. `num_in_flight`: of each request, how
    many tokens were sampled that its output_ids do not have yet. They count for min_new_tokens; in
    output_counts they are missing; what reads texts (`Req.needs_output`) cannot do without them.
    `reads_texts`: False leaves it out, for rows of a draft tree (see `node_sampling.with_texts`)."""
    num_outputs = [len(req.output_ids) for req in reqs]
    if num_in_flight is not None:
        num_outputs = [known + coming for known, coming in zip(num_outputs, num_in_flight)]
    params = [req.sampling_params for req in reqs]
    greedy = [p.is_greedy for p in params]
    temperatures, top_ps, min_ps, top_ks = [], [], [], []
    needs_filter = False
    for p, is_greedy in zip(params, greedy):
        # Greedy rows ignore the filters; these values keep them from asking for one.
        temperature, top_p, min_p, top_k = (1.0, 1.0, 0.0, 1) if is_greedy else _filter_values(p, vocab_size)
        needs_filter |= not is_greedy and (top_k < vocab_size or top_p < 1.0 or min_p > 0.0)
        temperatures.append(temperature)
        top_ps.append(top_p)
        min_ps.append(min_p)
        top_ks.append(top_k)
    adjusts_logits = any(
        req.needs_output or p.changes_logits or p.needs_penalty for req, p in zip(reqs, params)
    )
    adjustments: dict[str, Any] = {}
    if any(p.filter_order == "sequential" for p in params):
        is_sequential = [_is_sequential(p) for p in params]
        if any(is_sequential):
            adjustments["is_sequential"] = _on(is_sequential, device).to(torch.bool)
    if adjusts_logits:
        adjustments["logit_bias"] = _logit_bias(reqs, vocab_size, device)
        adjustments["banned"] = banned_tokens(reqs, num_outputs, vocab_size, device, reads_texts)
        adjustments |= _penalties(reqs, vocab_size, device)
        if reads_texts:
            adjustments["vocab_mask"] = _vocab_mask(reqs, vocab_size, device)
            adjustments["processors"] = group_processors(
                (req, row, req.output_ids) for row, req in enumerate(reqs)
            )
    floats = _rows_on([temperatures, top_ps, min_ps], torch.float32, device)
    ints = _rows_on([top_ks, [req.seed for req in reqs], greedy], torch.int64, device)
    return SamplingBatchInfo(
        temperatures=floats[0],
        top_ps=floats[1],
        min_ps=floats[2],
        top_ks=ints[0],
        seeds=ints[1],
        is_greedy=ints[2].to(torch.bool),
        is_all_greedy=all(greedy),
        needs_filter=needs_filter,
        **adjustments,
        return_logprob=any(p.return_logprob for p in params),
        num_top_logprobs=min(max((p.top_logprobs_num for p in params), default=0), vocab_size),
        asked_ids=asked_ids_of(reqs, device) if any(p.token_ids_logprob for p in params) else None,
    )


def _filter_values(p: SamplingParams, vocab_size: int) -> tuple[float, float, float, int]:
    """temperature, top_p, min_p and top_k; "keep all" is vocab_size."""
    top_k = vocab_size if p.top_k == -1 else min(p.top_k, vocab_size)
    return p.temperature, max(p.top_p, MIN_TOP_P), p.min_p, top_k


def _is_sequential(p: SamplingParams) -> bool:
    """Whether the order of the filters makes a difference."""
    return p.filter_order == "sequential" and p.top_k > 1 and p.top_p < 1.0 and not p.is_greedy


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with n > 1: sample 0 keeps the request's own."""
    if index == 0:
        return seed
    high, low = hash_noise(torch.tensor(seed), torch.tensor(index), torch.tensor([0, 1])).tolist()
    return (high << 32 | low) - 2**63


def _logit_bias(reqs: Sequence[Req], vocab_size: int, device: torch.device | str) -> torch.Tensor | None:
    """A bias of -inf is a ban, not an addition: -inf + inf would be NaN."""
    entries = [
        (row, token_id, bias)
        for row, req in enumerate(reqs)
        for token_id, bias in req.sampling_params.logit_bias.items()
        if bias != -math.inf and token_id < vocab_size
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries)
    logit_bias = torch.zeros(len(reqs), vocab_size, dtype=torch.float32, device=device)
    logit_bias[_on(rows, device), _on(ids, device)] = to_device(values, torch.float32, device)
    return logit_bias


def _vocab_mask(reqs: Sequence[Req], vocab_size: int, device: torch.device | str) -> torch.Tensor | None:
    if all(req.grammar is None for req in reqs):
        return None
    mask = torch.full((len(reqs), -(-vocab_size // 32)), -1, dtype=torch.int32)
    for row, req in enumerate(reqs):
        if req.grammar is not None and not req.finished:
            mask[row] = req.grammar.next_tokens(req.output_ids, vocab_size)
    return copy_to_device(mask, device)


def _penalties(
    reqs: Sequence[Req], vocab_size: int, device: torch.device | str
) -> dict[str, torch.Tensor | None]:
    if not any(req.sampling_params.needs_penalty for req in reqs):
        return {}
    info: dict[str, torch.Tensor | None] = {
        "output_counts": _counts(
            [req.output_ids if req.sampling_params.needs_penalty else () for req in reqs], vocab_size, device
        )
    }
    for name, neutral in (
        ("frequency_penalties", 0.0),
        ("presence_penalties", 0.0),
        ("repetition_penalties", 1.0),
    ):
        values = [getattr(req.sampling_params, name.replace("penalties", "penalty")) for req in reqs]
        if any(value != neutral for value in values):
            info[name] = to_device(values, torch.float32, device)
    if "repetition_penalties" in info:
        prompts = [
            req.prompt_text_ids if req.sampling_params.repetition_penalty != 1.0 else () for req in reqs
        ]
        info["prompt_mask"] = _counts(prompts, vocab_size, device) > 0
    return info


def _counts(
    ids_of_rows: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str
) -> torch.Tensor:
    """int32 [bs, vocab_size]: how often each id occurs in each row's list. A prompt may hold ids from
    vocab_size on, of padding rows of the embedding: they have no column and are not counted."""
    flat = _on(
        [row * vocab_size + i for row, ids in enumerate(ids_of_rows) for i in ids if i < vocab_size], device
    )
    counts = torch.zeros(len(ids_of_rows) * vocab_size, dtype=torch.int32, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts.view(len(ids_of_rows), vocab_size)


def _rows_on(rows: list[list[Any]], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Rows in one copy. Each begins at a multiple of 16 bytes: for other addresses kernels are compiled once
    more."""
    num = len(rows[0])
    padding = [0] * (-num % 4)
    return to_device([row + padding for row in rows], dtype, device)[:, :num]


def _on(ids: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return to_device(ids, torch.int64, device)
