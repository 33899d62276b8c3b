"""Routing: scores, groups, the k best experts and their weights, from a router's logits in one launch.

Roofline bound: logits read once, k weights and ids written: 4096 tokens of 128 experts are 1 MB, less than a
microsecond. So the bound is one launch, and for one token the latency of the chain of reductions.

Shape: a token is one warp, so nothing goes through shared memory. Experts are a [groups, experts of a group]
tile, padded to powers of two; plain softmax is one group. The k best are found one after the other, each by
one warp instruction: the maximum of integers that are ordered like the scores, the lowest id first among
equals. The lane that holds a selected expert writes its weight and id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import pdl_options
from diptych.shared.config import MoEConfig

_SMALLEST = tl.constexpr(-(2**31))


@triton.jit
def _ranks(values, is_real, COUNT: tl.constexpr):
    """The rank of the COUNT largest, from 0 on, of equals the earlier first; COUNT of all others. NaN counts
    as -inf; padding experts have no rank while there are COUNT real ones."""
    places = tl.arange(0, values.shape[0])
    bits = tl.where(values == values, values, float("-inf")).to(tl.int32, bitcast=True)
    # Integers in the order of the floats: a warp finds the largest of those in one instruction.
    keys = tl.where(is_real, bits ^ ((bits >> 31) & 0x7FFFFFFF), _SMALLEST)
    ranks = tl.full([values.shape[0]], COUNT, tl.int32)
    for rank in tl.static_range(COUNT):
        is_largest = keys == tl.max(keys, axis=0)
        is_next = places == tl.min(tl.where(is_largest, places, values.shape[0]), axis=0)
        ranks = tl.where(is_next, rank, ranks)
        keys = tl.where(is_next, _SMALLEST, keys)
    return ranks


@triton.jit(do_not_specialize=["scale"])
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, stride_logits, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BIASED: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = EXPERTS // GROUPS
    length: tl.constexpr = BLOCK_G * BLOCK_S
    token = tl.program_id(0).to(tl.int64)
    groups, slots = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    ids = groups * size + slots
    is_real = (groups < GROUPS) & (slots < size)
    if BIASED:
        bias = tl.load(bias_ptr + ids, mask=is_real, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logits = tl.load(logits_ptr + token * stride_logits + ids, mask=is_real, other=float("-inf"))
    logits = logits.to(tl.float32)
    if BIASED:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores + bias
    elif SIGMOID:
        scores, choice = 1.0 / (1.0 + tl.exp(-logits)), logits
    else:
        largest = tl.max(tl.max(logits, axis=1), axis=0)
        scores = tl.where(is_real, tl.exp(logits - largest), 0.0)
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
        choice = scores
    choice = tl.where(is_real, choice, float("-inf"))
    if KEPT_GROUPS < GROUPS:
        best = tl.max(choice, axis=1)
        if BIASED and size > 1:
            is_best = choice == best[:, None]
            place = tl.min(tl.where(is_best, slots, BLOCK_S), axis=1)  # of equals the second counts
            best += tl.max(tl.where(slots == place[:, None], float("-inf"), choice), axis=1)
        is_kept = _ranks(best, tl.arange(0, BLOCK_G) < GROUPS, KEPT_GROUPS) < KEPT_GROUPS
        choice = tl.where(is_kept[:, None], choice, float("-inf"))
    ranks = _ranks(tl.reshape(choice, [length]), tl.reshape(is_real, [length]), TOP_K)
    weights = tl.reshape(scores, [length])
    if NORMALISED:
        weights = weights / tl.sum(tl.where(ranks < TOP_K, weights, 0.0), axis=0)
    is_chosen = ranks < TOP_K
    tl.store(weights_ptr + token * TOP_K + ranks, weights * scale, mask=is_chosen)
    tl.store(ids_ptr + token * TOP_K + ranks, tl.reshape(ids, [length]), mask=is_chosen)


def route(
    config: MoEConfig, logits: torch.Tensor, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_tokens, num_experts] -> weights float32 and ids int32, [num_tokens, k]."""
    num_tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    shape = (num_tokens, config.num_experts_per_tok)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return weights, ids
    options = _options(config, correction_bias is not None)
    _route_kernel[(num_tokens,)](
        logits, logits if correction_bias is None else correction_bias, weights, ids, logits.stride(0),
        config.routed_scaling_factor, EXPERTS=num_experts, **options, num_warps=1, **pdl_options(logits),
    )  # fmt: skip
    return weights, ids


def _options(config: MoEConfig, has_bias: bool) -> dict[str, int | bool]:
    is_biased = config.routing == "biased-grouped"
    assert is_biased == has_bias
    is_grouped = config.routing in ("grouped", "biased-grouped")
    groups = config.num_expert_groups if is_grouped else 1
    return {
        "GROUPS": groups,
        "KEPT_GROUPS": config.topk_group if is_grouped else 1,
        "TOP_K": config.num_experts_per_tok,
        "BLOCK_G": triton.next_power_of_2(groups),
        "BLOCK_S": triton.next_power_of_2(config.num_experts // groups),
        "BIASED": is_biased,
        "SIGMOID": config.routing == "sigmoid",
        "NORMALISED": config.norm_topk_prob,
    }
