"""Outputs of experts in float64."""

from __future__ import annotations

import math
from functools import partial

import torch

from diptych.shared.interfaces import TopKOutput


def experts64(
    x: torch.Tensor,
    topk: TopKOutput,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
    hidden_act: str = "silu",
) -> torch.Tensor:
    """The expected output in float64, one expert after another."""
    x = x.double()
    b13, b2 = (x.new_zeros(w.shape[:2]) if b is None else b.double() for w, b in ((w13, b13), (w2, b2)))
    act = partial(clamped_swiglu64, limit=swiglu_limit) if swiglu_limit > 0 else ACTS64[hidden_act]
    y = torch.zeros_like(x)
    ids = topk.topk_ids
    for e in ids[ids >= 0].unique().tolist():
        tokens, choices = torch.where(ids == e)
        hidden = act(x[tokens] @ w13[e].double().T + b13[e])
        weights = topk.topk_weights[tokens, choices, None].double()
        y.index_add_(0, tokens, weights * (hidden @ w2[e].double().T + b2[e]))
    return y


def clamped_swiglu64(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


def silu_and_mul64(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_and_mul64(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


ACTS64 = {"silu": silu_and_mul64, "gelu_tanh": gelu_and_mul64}
