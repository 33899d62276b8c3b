"""The parameters of one attention layer, and of its K and V in the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_TYPES = {FP8: FP8_MAX, torch.float8_e5m2: 57344.0}
"""The types of FP8 pools, and the largest value of each."""


class KVScales(NamedTuple):
    """The scales of one layer's K and V in an FP8 pool, which holds k / scales.k and v / scales.v."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The attention of one layer: everything that does not depend on the batch."""

    layer_id: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    sliding_window: int = -1  # previous tokens visible besides the token itself; -1: all
    attention_chunk: int = 0  # positions are in chunks of so many, and a token sees its own; 0: all are one
    logit_cap: float = 0.0  # soft-cap: cap * tanh(score / cap), after the scale; 0: none
    sinks: torch.Tensor | None = None  # [num_qo_heads]: one more logit in the softmax, without a value
    v_head_dim: int | None = None  # of V and the output; None: head_dim

    @property
    def output_dim(self) -> int:
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, eq=False, kw_only=True)
class MLALayer(AttentionLayer):
    """Multi-head latent attention. The KV of a token is one row, [c | k_r]: c has kv_lora_rank numbers, k_r
    qk_rope_head_dim. Head h has k = [W_k c | k_r] and v = W_v c, with its part of kv_b_proj's weight."""

    v_head_dim: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    kv_b_proj: nn.Module  # weight [num_qo_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]

    @property
    def w_k(self) -> torch.Tensor:
        """[num_qo_heads, qk_nope_head_dim, kv_lora_rank]"""
        return self._of_heads()[:, : self.qk_nope_head_dim]

    @property
    def w_v(self) -> torch.Tensor:
        """[num_qo_heads, v_head_dim, kv_lora_rank]"""
        return self._of_heads()[:, self.qk_nope_head_dim :]

    @property
    def absorbed(self) -> AttentionLayer:
        """The attention over the rows themselves: one KV head, whose values are the first kv_lora_rank
        numbers of its keys."""
        row_size = self.kv_lora_rank + self.head_dim - self.qk_nope_head_dim
        return AttentionLayer(
            self.layer_id, self.num_qo_heads, 1, row_size, self.scale, v_head_dim=self.kv_lora_rank
        )

    def _of_heads(self) -> torch.Tensor:
        weight = self.kv_b_proj.weight
        assert isinstance(weight, torch.Tensor)
        return weight.view(self.num_qo_heads, -1, self.kv_lora_rank)
