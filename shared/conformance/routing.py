"""Near ties of a router: which experts a token goes to may flip on an allowed error of its logits."""

from __future__ import annotations

import torch

from shared.config import ModelConfig


def experts_part(config: ModelConfig, gate_a: torch.Tensor | None, gate_b: torch.Tensor | None) -> str | None:
    """Why a token's experts may differ: its router logits [num_experts] on the two sides are close, and yet
    the best `num_experts_per_tok` are not the same ones. None when they are, or when that is not the rule by
    which the model routes."""
    if config.moe is None or config.moe.routing != "softmax" or gate_a is None or gate_b is None:
        return None
    a, b = (_best(gate, config.moe.num_experts_per_tok) for gate in (gate_a, gate_b))
    if a == b:
        return None
    left, taken = sorted(a - b), sorted(b - a)
    gap = max(float(gate_a[i] - gate_a[j]) for i in left for j in taken)
    return f"expert {left} or {taken}: router logits {gap:.2g} apart"


def _best(gate: torch.Tensor, k: int) -> set[int]:
    """Of equal logits the lowest expert id comes first."""
    order = torch.sort(gate.float().cpu(), descending=True, stable=True).indices
    return set(order[:k].tolist())
