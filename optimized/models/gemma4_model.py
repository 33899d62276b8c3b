"""Gemma-4 (text): the layer of Gemma-3 with an input of its own for each token, and a factor of its output.

In attention V has a norm without a weight. In some models layers of full attention take V from the projection
of K; in others the last layers take K and V from an earlier one.

Differs from reference: as gemma.py does, but norms, rotation and store are kernels of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from diptych.optimized.decoder import DecoderAttention
from diptych.optimized.layers import Linear, MergedLinear
from diptych.optimized.models.gemma import GemmaDecoderLayer, GemmaForCausalLM
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.gemma4_modules import LayerInput, LayerInputs
from diptych.shared.modeling.stream import Stream


class Gemma4Attention(DecoderAttention):
    def __init__(self, config: ModelConfig, layer_id: int, *more: Any) -> None:
        super().__init__(config, layer_id, *more)
        self.eps = config.rms_norm_eps
        parts = {name: self.qkv_proj.parts[name] for name in config.projections(layer_id)}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.qkv_bias)
        if "k_proj" not in parts:
            self.k_norm = None

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """x: from qkv_proj -> for o_proj, [num_tokens, num_qo_heads * head_dim]."""
        layer, rotary_emb, k, v = self.layer, self.rotary_emb, None, None
        assert self.q_norm is not None
        parts = {
            name: part.unflatten(1, (-1, layer.head_dim)) for name, part in self.qkv_proj.split(x).items()
        }
        # --8<-- [start:shared-kv]
        q = self.q_norm(parts["q_proj"])
        if self.k_norm is None:  # K and V are in the pool, from an earlier layer
            q, _ = rotary_emb(positions, q, q[:, :1])
        else:
            k = parts["k_proj"]
            v = F.rms_norm(parts.get("v_proj", k), (layer.head_dim,), eps=self.eps)
            q, k = rotary_emb(positions, q, self.k_norm(k))
            attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        return attention.backend.run(q, layer, attention.plan, k=k, v=v).flatten(1)
        # --8<-- [end:shared-kv]


class Gemma4DecoderLayer(LayerInput, GemmaDecoderLayer):
    attention_class: Any = Gemma4Attention
    linear_class = Linear

    def feed_forward(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return self.add_experts(x, super().feed_forward(x, normed))

    def forward(self, x: Stream, positions: torch.Tensor, attention: BatchAttention) -> Stream:
        total = super().forward(x, positions, attention).total()
        rows = attention.rows if self.is_last else None
        return Stream(self.add_layer_input(total, attention, rows))


class Gemma4ForCausalLM(LayerInputs, GemmaForCausalLM):
    layer_class: Any = Gemma4DecoderLayer
