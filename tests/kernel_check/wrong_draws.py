"""Planted bugs of samplers and of the verification of drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.kernel_check.right import sample, verify


def first_of_all(*tensors: Any) -> tuple[Any, ...]:
    """Row 0 in place of every row."""
    return tuple(each[:1].expand_as(each) for each in tensors)


def filtered(logits: Any, temperature: Any, top_k: Any, top_p: Any, mistake: str) -> Any:
    """top-p with a mistake, by sorting."""
    probs, ids = (logits / temperature[:, None]).softmax(-1).sort(dim=-1, descending=True, stable=True)
    is_kept = torch.arange(logits.shape[1], device=logits.device) < top_k[:, None]
    if mistake == "top-k first":
        probs = probs * is_kept
        probs = probs / probs.sum(-1, keepdim=True)
    until = probs.cumsum(-1) if mistake == "crossing dropped" else probs.cumsum(-1) - probs
    is_kept &= (until < top_p[:, None]) | (top_p == 1)[:, None]
    is_kept[:, 0] = True
    return ids.gather(1, torch.multinomial(probs * is_kept, 1))[:, 0]


def neighbours_draft(draft_probs: Any, draft_ids: Any, target_probs: Any) -> Any:
    return verify(draft_probs, draft_ids.roll(-1, 0), target_probs)


def drafts_not_written(draft_probs: Any, draft_ids: Any, target_probs: Any) -> Any:
    """An accepted place holds a new sample of the target, not the draft."""
    ids = verify(draft_probs, draft_ids, target_probs)
    sampled = torch.multinomial(target_probs.flatten(0, 1), 1).view(ids.shape)
    return torch.where(ids >= 0, sampled, ids)


def zeros_after_the_last(draft_probs: Any, draft_ids: Any, target_probs: Any) -> Any:
    return verify(draft_probs, draft_ids, target_probs).clamp(min=0)


WRONG_DRAWS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "temperature": (
        "sampler",
        lambda x, t, k, p: sample(x, torch.ones_like(t), k, p),
        "the temperature is ignored",
    ),
    "top-k": ("sampler", lambda x, t, k, p: sample(x, t, k * 0 + 10**6, p), "top-k is ignored"),
    "top-k + 1": ("sampler", lambda x, t, k, p: sample(x, t, k + 1, p), "one token too many"),
    "top-p": ("sampler", lambda x, t, k, p: sample(x, t, k, torch.ones_like(p)), "top-p is ignored"),
    "greedy": ("sampler", lambda x, t, k, p: x.argmax(-1), "most probable token"),
    "residual of drafts": ("verify", lambda q, i, p: verify(q, i, p, "no residual"), "not the residual"),
    "all drafts": ("verify", lambda q, i, p: verify(q, i, p, "all"), "every draft is accepted"),
    "no ratio": ("verify", lambda q, i, p: verify(q, i, p, "target only"), "not p / q"),
    "rows' parameters": (
        "sampler",
        lambda x, *parameters: sample(x, *first_of_all(*parameters)),
        "every row gets the parameters of the first",
    ),
    "rows' logits": (
        "sampler",
        lambda x, t, k, p: sample(*first_of_all(x), t, k, p),  # type: ignore[call-arg]
        "every row reads the logits of the first",
    ),
    "top-k first": (
        "sampler",
        lambda x, t, k, p: filtered(x, t, k, p, "top-k first"),
        "top-p is applied to what top-k leaves, renormalised",
    ),
    "crossing": (
        "sampler",
        lambda x, t, k, p: filtered(x, t, k, p, "crossing dropped"),
        "the token that crosses top_p is dropped",
    ),
    "float ids": (
        "sampler",
        lambda x, t, k, p: sample(x, t, k, p).float() + 0.4,
        "dtype of ids: float32, expected int32 or int64",
    ),
    "fewer ids": (
        "sampler",
        lambda x, t, k, p: sample(x, t, k, p)[:15_000],
        "shape of ids: [15000], expected [20000] or [20000, 1]",
    ),
    "no token": (
        "sampler",
        lambda x, t, k, p: sample(x, t, k, p) + 10**6 * (torch.arange(len(x), device=x.device) == 3),
        "a token id: 10000",
    ),
    "neighbour": ("verify", neighbours_draft, "a token that others follow"),
    "no drafts": ("verify", drafts_not_written, "a token that others follow"),
    "zeros": ("verify", zeros_after_the_last, "a token that others follow"),
    "float tokens": ("verify", lambda q, i, p: verify(q, i, p).float(), "dtype of ids: float32"),
    "fewer tokens": ("verify", lambda q, i, p: verify(q, i, p)[:-1], "shape of ids: [19999, 2]"),
}  # fmt: skip
"""name -> operation, function in the convention of torch, what must be in the verdict"""
