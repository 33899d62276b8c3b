"""Llama-4's text model: chunked attention with RoPE, and in some layers full attention without.

The rest is the decoder with options of ModelConfig: RoPE of neighbouring dimensions, and one routed
expert per token in addition to the shared one.

Differs from reference: as decoder.py does, but rotation, norm and store are kernels of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.decoder import DecoderAttention, DecoderForCausalLM, DecoderLayer
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.llama4_rotation import Llama4Rotation


class Llama4Attention(Llama4Rotation, DecoderAttention):
    """Layers with RoPE norm the heads of q and k afterwards, without a weight. Layers without RoPE scale q by
    a temperature that grows with the position."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """Compute what DecoderAttention does: x is from qkv_proj, the result for o_proj."""
        layer = self.layer
        q, k, v = (part.unflatten(1, (-1, layer.head_dim)) for part in self.qkv_proj.split(x).values())
        q, k = self.rotate(q, k, positions)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        return attention.backend.run(q, layer, attention.plan, k=k, v=v).flatten(1)


class Llama4DecoderLayer(DecoderLayer):
    attention_class: Any = Llama4Attention


class Llama4ForCausalLM(DecoderForCausalLM):
    layer_class = Llama4DecoderLayer
