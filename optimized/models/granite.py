"""Granite: factors of the embeddings, of what attention and MLP add, and of the logits.

Differs from reference: the residual stream is divided by r, the factor of what a layer adds. A layer then
adds without a factor, by the decoder's kernels. A norm removes a factor of its input if its eps is divided by
the square: norm(x, eps) = norm(x / r, eps / r²). Hidden states that are captured are multiplied by r.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.optimized.decoder import DecoderForCausalLM, DecoderLayer
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.stream import Stream


class GraniteDecoderLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, *args: Any) -> None:
        eps = config.rms_norm_eps / config.residual_scale**2
        super().__init__(replace(config, rms_norm_eps=eps), *args)

    def forward(self, x: Stream, positions: torch.Tensor, attention: BatchAttention) -> Stream:
        """Both streams are divided by r."""
        return super().forward(x, positions, attention)


class GraniteForCausalLM(DecoderForCausalLM):
    layer_class: Any = GraniteDecoderLayer

    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.model.norm.eps /= config.residual_scale**2

    # --8<-- [start:scaled-stream]
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor] | None = None,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        factor, captured = self.config.residual_scale, {} if captured is None else captured
        embeds = self.embed(input_ids) if input_embeds is None else input_embeds
        hidden_states = super().forward(input_ids, positions, attention, captured, embeds / factor)
        for layer_id, hidden in captured.items():
            captured[layer_id] = embeds if layer_id == 0 else hidden.mul_(factor)
        return hidden_states
        # --8<-- [end:scaled-stream]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.config.embed_scale

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states).mul_(self.config.logits_scale)
