"""Granite: factors of the embeddings, of what attention and MLP add, and of the logits."""

from __future__ import annotations

from typing import Any

import torch

from diptych.reference.decoder import DecoderForCausalLM, DecoderLayer
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention


class GraniteDecoderLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.scale = config.residual_scale

    # --8<-- [start:scaled-stream]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        heads = self.self_attn(self.input_layernorm(x), positions, attention)
        x = x + self.scale * self.tp.all_reduce(heads)
        hidden = self.mlp(self.post_attention_layernorm(x))
        return x + self.scale * self.tp.all_reduce(hidden)
        # --8<-- [end:scaled-stream]


class GraniteForCausalLM(DecoderForCausalLM):
    layer_class = GraniteDecoderLayer

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.config.embed_scale

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states) * self.config.logits_scale
