"""Logits to tokens, one plain function for each step of the contract."""

from __future__ import annotations

from dataclasses import replace

import torch

from shared.interfaces import sampler as contract
from shared.sampling.logprobs import logprobs_of
from shared.sampling.noise import gumbel_noise
from shared.sampling.ordering import sort_descending
from shared.types import SampleOutput, SamplingBatchInfo

NEG_INF = float("-inf")


class Sampler(contract.Sampler):
    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        # --8<-- [start:sample-steps]
        logits = logits.float()
        has_nan = logits.amax(dim=-1).isnan()  # now: masking would hide a NaN

        logits = apply_penalties(logits, info)
        logits = apply_masks(logits, info)
        if info.logit_bias is not None:
            logits = logits + info.logit_bias

        max_logits = logits.amax(dim=-1)
        is_bad = has_nan | max_logits.isnan() | (max_logits == NEG_INF)
        if info.is_all_greedy and not info.return_logprob:
            return SampleOutput(logits.argmax(dim=-1).masked_fill(is_bad, -1))

        scaled = scale(logits, max_logits, info.temperatures)
        if info.is_all_greedy:
            next_token_ids = logits.argmax(dim=-1)
        else:
            next_token_ids = draw(scaled, info, positions)
            # top_k=1 would not do: different logits can round to equal scaled ones.
            next_token_ids = torch.where(info.is_greedy, logits.argmax(dim=-1), next_token_ids)
        next_token_ids = next_token_ids.masked_fill(is_bad, -1)
        # --8<-- [end:sample-steps]

        if not info.return_logprob:
            return SampleOutput(next_token_ids)
        return SampleOutput(next_token_ids, logprobs_of(scaled, next_token_ids, info.num_top_logprobs))


def apply_penalties(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    if info.output_counts is None:
        return logits
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
    """(logits - max) / temperature: softmax ignores the shift, and nothing overflows however small the
    temperature. A logit of +inf is the limit of a large one: the tokens that have it share everything."""
    max_logits = max_logits[:, None]
    return ((logits - max_logits) / temperatures[:, None]).masked_fill(logits == max_logits, 0.0)


def draw(scaled: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """[bs] int64: the token with the largest log p + Gumbel noise among those that the filters keep.

    `scaled` differs from log p by a constant in each row, which changes no argmax."""
    if scaled.device.type == "mps":  # has no float64
        on_cpu = {name: getattr(info, name).cpu() for name in ("seeds", "top_ks", "top_ps", "min_ps")}
        return draw(scaled.cpu(), replace(info, **on_cpu), positions.cpu()).to(scaled.device)
    # --8<-- [start:gumbel-draw]
    seeds, positions = info.seeds[:, None], positions[:, None]
    if not info.needs_filter:
        token_ids = torch.arange(scaled.shape[-1], device=scaled.device)
        return (scaled + gumbel_noise(seeds, positions, token_ids)).argmax(dim=-1)
    ordered, token_ids = sort_descending(scaled, num=int(info.top_ks.max()))
    total = scaled.to(torch.float64).exp().sum(dim=-1)
    keep = filter_mask(ordered, total, info)
    num_columns = max(int(keep.sum(dim=-1).max()), 1)  # what is kept is a prefix of each row
    ordered = ordered.masked_fill(~keep, NEG_INF)[:, :num_columns]
    token_ids = token_ids[:, :num_columns]
    best = (ordered + gumbel_noise(seeds, positions, token_ids)).argmax(dim=-1, keepdim=True)
    return token_ids.gather(-1, best)[:, 0]
    # --8<-- [end:gumbel-draw]


def filter_mask(ordered: torch.Tensor, total: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Joint top-k, top-p and min-p -> bool, as `ordered`: a prefix of each row.

    ordered: [bs, n], the largest of each row of `scaled`, in order; total: [bs], sum of exp(scaled)."""
    weights = ordered.to(torch.float64).exp()  # p / max p
    before = weights.cumsum(dim=-1) - weights
    top_ps = info.top_ps[:, None]
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = ranks < info.top_ks[:, None]
    # top_p = 1 keeps everything; the rounded sum could reach the total too early.
    keep &= (before < top_ps * total[:, None]) | (top_ps >= 1.0)
    keep &= weights >= info.min_ps[:, None]
    return keep
