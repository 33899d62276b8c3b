"""A LoRA adapter: low-rank changes of a model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """What an adapter adds to one linear layer: y += scale * B (A x)."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    scale: float


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """Equal only to itself: two loads of one name are two adapters."""

    name: str
    content_id: str  # a digest of all that it computes: cached KV is found under it
    modules: Mapping[str, LoraWeights]  # by the layer's name in the model

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max((weights.a.shape[0] for weights in self.modules.values()), default=0)
