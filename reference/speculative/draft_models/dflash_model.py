"""DFlash: a few decoder layers that fill in a block of masks behind the target's hidden states.

Checkpoints hold fc, hidden_norm, layers.N.* and norm; embedding and head are the target's. K and V of the
text come from the target's hidden states alone: the same rows for every layer.
"""

from __future__ import annotations

import torch

from diptych.reference.decoder import DecoderAttention, DecoderLayer
from diptych.reference.layers import Linear
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.speculation.dflash_modules import DFlashModules


class DFlashAttention(DecoderAttention):
    def store(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> None:
        """Write K and V of x [n, hidden_size]."""
        layer = self.layer
        k = self.k_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        v = self.v_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        if self.k_norm is not None:
            k = self.k_norm(k)
        _, k = self.rotary_emb(positions, k, k)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)


class DFlashDecoderLayer(DecoderLayer):
    attention_class = DFlashAttention


class DFlashModel(DFlashModules):
    layer_class = DFlashDecoderLayer
    linear_class = Linear

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: BatchAttention
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return self.norm(x)
