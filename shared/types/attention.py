"""The parameters of one attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The attention of one layer: everything that does not depend on the batch."""

    layer_id: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    sliding_window: int = -1  # previous tokens visible besides the token itself; -1: all
    logit_cap: float = 0.0  # soft-cap: cap * tanh(score / cap), after the scale; 0: none
    sinks: torch.Tensor | None = None  # [num_qo_heads]: one more logit in the softmax, without a value
