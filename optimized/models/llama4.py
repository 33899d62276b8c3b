"""Llama-4's text model: chunked attention with RoPE, and in some layers full attention without.

The rest is the decoder with options of ModelConfig: RoPE of neighbouring dimensions, and one routed
expert per token in addition to the shared one.

Differs from reference: as decoder.py does, but rotation, norm and store are kernels of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from diptych.optimized.decoder import DecoderAttention, DecoderForCausalLM, DecoderLayer, DecoderModel
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import temperature


class Llama4Attention(DecoderAttention):
    """Layers with RoPE norm the heads of q and k afterwards, without a weight. Layers without RoPE scale q by
    a temperature that grows with the position."""

    def __init__(self, config: ModelConfig, layer_id: int, *more: Any) -> None:
        super().__init__(config, layer_id, *more)
        self.has_l2_norm = config.qk_l2_norm
        self.eps = config.rms_norm_eps
        self.temperature = config.attn_temperature

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """As in DecoderAttention: x is from qkv_proj, the result for o_proj."""
        # --8<-- [start:rope-or-temperature]
        layer = self.layer
        q, k, v = (part.unflatten(1, (-1, layer.head_dim)) for part in self.qkv_proj.split(x).values())
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
            if self.has_l2_norm:
                q, k = (F.rms_norm(x, x.shape[-1:], eps=self.eps) for x in (q, k))
        elif self.temperature is not None:
            q = (q * temperature(self.temperature, positions)[:, None, None]).to(q.dtype)
        # --8<-- [end:rope-or-temperature]
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        return attention.backend.run(q, layer, attention.plan, k=k, v=v).flatten(1)


class Llama4DecoderLayer(DecoderLayer):
    attention_class = Llama4Attention


class Llama4Model(DecoderModel):
    layer_class = Llama4DecoderLayer


class Llama4ForCausalLM(DecoderForCausalLM):
    body_class = Llama4Model
