"""What one layer asks of an attention backend, and the handle through which a model calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shared.interfaces.attention import AttentionBackend
    from shared.interfaces.memory_pool import TokenToKVPool


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The attention of one layer, apart from the batch."""

    layer_id: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    sliding_window: int = -1  # previous tokens visible beside the token itself; -1: all
    logit_cap: float = 0.0  # soft-cap: cap * tanh(score / cap), after the scale; 0: none
    sinks: torch.Tensor | None = None  # [num_qo_heads]: a logit that takes part in the softmax, no value


@dataclass(frozen=True, eq=False)
class BatchAttention:
    """Attention as a model sees it during one step: the backend, this step's plan, and where KV goes.

    A model either calls `store_and_run`, or, when a fused kernel has stored K and V, `run`.
    """

    backend: AttentionBackend
    plan: Any
    kv_pool: TokenToKVPool
    out_cache_loc: torch.Tensor  # [num_tokens] int64
    rows: torch.Tensor | None = None  # int64, of the tokens whose hidden states are wanted; None: of all

    def store_and_run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        self.kv_pool.store(layer.layer_id, self.out_cache_loc, k, v)
        return self.backend.run(q, layer, self.plan, k=k, v=v)

    def run(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self.backend.run(q, layer, self.plan)
