"""Gemma-4 (text): the layer of Gemma-3 with an input of its own for each token, and a factor of its output.

In attention V has a norm without a weight. In some models layers of full attention take V from the projection
of K; in others the last layers take K and V from an earlier one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from diptych.reference.decoder import DecoderAttention
from diptych.reference.layers import Linear
from diptych.reference.models.gemma import GemmaDecoderLayer, GemmaForCausalLM
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.gemma4_modules import LayerInput, LayerInputs


class Gemma4Attention(DecoderAttention):
    def __init__(self, config: ModelConfig, layer_id: int, *more: Any) -> None:
        super().__init__(config, layer_id, *more)
        self.eps = config.rms_norm_eps
        own, of_layer = config.projections(layer_id), ("k_proj", "v_proj", "k_norm")
        for name in of_layer:
            if name.replace("norm", "proj") not in own:
                setattr(self, name, None)

    # --8<-- [start:shared-kv]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        layer, k, v = self.layer, None, None
        assert self.q_norm is not None
        q = self.q_norm(self.q_proj(x).view(-1, layer.num_qo_heads, layer.head_dim))
        if self.k_norm is None:  # K and V are in the pool, from an earlier layer
            q, _ = self.rotary_emb(positions, q, q[:, :1])
        else:
            k = self.k_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
            v = k if self.v_proj is None else self.v_proj(x).view_as(k)
            v = F.rms_norm(v, v.shape[-1:], eps=self.eps)
            q, k = self.rotary_emb(positions, q, self.k_norm(k))
            attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        output = attention.backend.run(q, layer, attention.plan, k=k, v=v)
        return self.o_proj(output.flatten(1))
        # --8<-- [end:shared-kv]


class Gemma4DecoderLayer(LayerInput, GemmaDecoderLayer):
    attention_class: Any = Gemma4Attention
    linear_class = Linear

    def feed_forward(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return self.add_experts(x, super().feed_forward(x, normed))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        return self.add_layer_input(super().forward(x, positions, attention), attention)


class Gemma4ForCausalLM(LayerInputs, GemmaForCausalLM):
    layer_class: Any = Gemma4DecoderLayer
