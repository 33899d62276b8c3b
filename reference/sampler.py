"""The sampler: one plain function for each step of the contract."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.interfaces import sampler as contract
from diptych.shared.sampling.logprobs import logprobs_of, sort_descending
from diptych.shared.sampling.noise import gumbel_noise
from diptych.shared.sampling.processors import apply_processors
from diptych.shared.types import SampleOutput, SamplingBatchInfo

NEG_INF = float("-inf")


class Sampler(contract.Sampler):
    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        # --8<-- [start:sample-steps]
        logits = logits.float()
        has_nan = logits.isnan().any(dim=-1)  # before masks can hide a NaN
        logits = adjust(logits, info)
        if info.processors:
            logits = apply_processors(logits, info)
        max_logits = logits.amax(dim=-1)
        scaled = scale(logits, max_logits, info.temperatures)
        # Greedy rows use unscaled logits, because two different logits can be equal
        # after scaling.
        next_token_ids = logits.argmax(dim=-1)
        if not info.is_all_greedy:
            drawn = draw(scaled, info, positions)
            next_token_ids = torch.where(info.is_greedy, next_token_ids, drawn)
        is_bad = has_nan | max_logits.isnan() | (max_logits == NEG_INF)
        next_token_ids = next_token_ids.masked_fill(is_bad, -1)
        # --8<-- [end:sample-steps]

        if not info.return_logprob:
            return SampleOutput(next_token_ids)
        found = logprobs_of(scaled, next_token_ids, info.num_top_logprobs, info.asked_ids)
        return SampleOutput(next_token_ids, found)


def adjust(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Penalties, then masks, then the bias: a banned token stays banned, whatever its bias."""
    if info.output_counts is not None:
        logits = apply_penalties(logits, info)
    if info.vocab_mask is not None or info.banned is not None:
        logits = apply_masks(logits, info)
    if info.logit_bias is not None:
        logits = logits + info.logit_bias
    return logits


def apply_penalties(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    assert info.output_counts is not None
    if info.repetition_penalties is not None:
        seen = info.output_counts > 0
        if info.prompt_mask is not None:
            seen = seen | info.prompt_mask
        penalties = info.repetition_penalties[:, None]
        penalised = torch.where(logits > 0, logits / penalties, logits * penalties)
        logits = torch.where(seen, penalised, logits)
    if info.frequency_penalties is not None:
        logits = logits - info.frequency_penalties[:, None] * info.output_counts
    if info.presence_penalties is not None:
        logits = logits - info.presence_penalties[:, None] * (info.output_counts > 0)
    return logits


def apply_masks(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    if info.vocab_mask is not None:
        token_ids = torch.arange(logits.shape[-1], device=logits.device)
        bits = (info.vocab_mask[:, token_ids // 32] >> (token_ids % 32).to(torch.int32)) & 1
        logits = logits.masked_fill(bits == 0, NEG_INF)
    if info.banned is not None:
        logits = logits.masked_fill(info.banned, NEG_INF)
    return logits


def scale(logits: torch.Tensor, max_logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """(logits - max) / temperature. The shift does not change the softmax and avoids overflow. A maximum of
    +inf gives 0 to the tokens that have it and -inf to all others."""
    max_logits = max_logits[:, None]
    return ((logits - max_logits) / temperatures[:, None]).masked_fill(logits == max_logits, 0.0)


def draw(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """Scaled logits -> [bs] int64: the token with the largest log p + Gumbel noise among those that filters
    keep. A row of scaled logits differs from log p by a constant, which changes no argmax."""
    if logits.device.type == "mps":  # has no float64
        names = ("seeds", "top_ks", "top_ps", "min_ps", "is_sequential")
        on_cpu = {name: getattr(info, name).cpu() for name in names if getattr(info, name) is not None}
        return draw(logits.cpu(), replace(info, **on_cpu), positions.cpu()).to(logits.device)
    # --8<-- [start:gumbel-draw]
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noise = gumbel_noise(info.seeds[:, None], positions[:, None], token_ids)
    if info.needs_filter:
        ordered, ids_in_order = sort_descending(logits)
        kept = ordered.masked_fill(~filter_mask(ordered, info), NEG_INF)
        logits = torch.empty_like(logits).scatter(-1, ids_in_order, kept)
    return (logits + noise).argmax(dim=-1)
    # --8<-- [end:gumbel-draw]


def filter_mask(ordered: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Top-k, top-p and min-p, joint or one after the other. ordered: [bs, vocab_size], rows of `scaled`, the
    likeliest token first -> bool of the same shape: the tokens that stay."""
    weights = ordered.to(torch.float64).exp()  # p / max p
    before = weights.cumsum(dim=-1) - weights
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = ranks < info.top_ks[:, None]
    total = weights.sum(dim=-1, keepdim=True)
    if info.is_sequential is not None:  # of what top-k keeps, in these rows
        of_top_k = weights.masked_fill(~keep, 0.0).sum(dim=-1, keepdim=True)
        total = torch.where(info.is_sequential[:, None], of_top_k, total)
    top_ps = info.top_ps[:, None]
    # top_p = 1 keeps everything: the rounded sum can reach the total before the last token.
    keep &= (before < top_ps * total) | (top_ps >= 1.0)
    keep &= weights >= info.min_ps[:, None]
    return keep
