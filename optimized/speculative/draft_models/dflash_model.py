"""DFlash: a few decoder layers that fill in a block of masks behind the target's hidden states.

Differs from reference: the layers are the target's (decoder.py), with merged GEMMs and fused kernels. K and V
of the features come from the rows of the merged weight that are theirs, and one kernel norms, rotates and
stores them, beside queries that are not computed. Assumes the panel's layers; with others it runs too, one
kernel after the other. Loses a copy: the features' rows have a place for queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from diptych.optimized.decoder import DecoderAttention, DecoderLayer
from diptych.optimized.layers import (
    Linear,
    RotaryEmbedding,
    add_and_norm,
    is_builtin_layer,
    is_builtin_norm,
    logits,
)
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.stream import Stream
from diptych.shared.speculation.dflash_modules import DFlashModules


class DFlashAttention(DecoderAttention):
    def store(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> None:
        """Write K and V of x [n, hidden_size]."""
        layer, rotary_emb = self.layer, self.rotary_emb
        q_norm: Any = self.q_norm
        k_norm: Any = self.k_norm
        qkv, q_size = self.qkv_proj, layer.num_qo_heads * layer.head_dim
        bias = None if qkv.bias is None else qkv.bias[q_size:]
        kv = functional.linear(x, qkv.weight[q_size:], bias)
        has_own_norms = k_norm is None or (is_builtin_norm(q_norm) and is_builtin_norm(k_norm))
        if is_builtin_layer(rotary_emb, RotaryEmbedding) and rotary_emb.can_store and has_own_norms:
            rows = functional.pad(kv, (q_size, 0))
            rotary_emb.rotate_and_store(rows, positions, q_norm, k_norm, attention, layer)
            return
        k, v = (part.unflatten(1, (-1, layer.head_dim)) for part in kv.chunk(2, dim=1))
        if k_norm is not None:
            k = k_norm(k.contiguous())
        _, k = rotary_emb(positions, k, k)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)


class DFlashDecoderLayer(DecoderLayer):
    attention_class = DFlashAttention


class DFlashModel(DFlashModules):
    layer_class = DFlashDecoderLayer
    linear_class = Linear

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: BatchAttention
    ) -> torch.Tensor:
        x = Stream(self.embed(input_ids).contiguous())
        for layer in self.layers:
            x = layer(x, positions, attention)
        return add_and_norm(self.norm, x)[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (
            super().compute_logits(hidden_states) if self.head is None else logits(hidden_states, self.head)
        )
