"""EAGLE and EAGLE-2: one decoder layer that continues the target's last hidden states.

EAGLE-2 has the same weights; only the shape of the drafted tree is new.

Checkpoints hold fc, layers.0.* without an input norm, perhaps fc.bias, and often a copy of the target's
embedding. There is no final norm: the layer learns to give what the target's final norm would.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.reference.decoder import DecoderLayer
from diptych.reference.layers import Linear
from diptych.shared.config import DraftConfig
from diptych.shared.interfaces import MoE
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.draft_model import DraftOutput, StepDraftModel
from diptych.shared.interfaces.layers import Layers
from diptych.shared.speculation.draft_model_base import BaseDraftModel


class EagleModel(BaseDraftModel, StepDraftModel):
    def __init__(self, config: DraftConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__(config, layers, moe)
        model = config.model
        rotary_emb = layers.RotaryEmbedding(model.rope, model.head_dim, model.context_len)
        self.fc = Linear(model.hidden_size + config.target_hidden_size, model.hidden_size, bias=True)
        self.layers = nn.ModuleList(
            DecoderLayer(model, layer_id, layers, moe, rotary_emb)
            for layer_id in range(model.num_hidden_layers)
        )
        self.layers[0].input_layernorm = nn.Identity()

    def canonical_name(self, name: str) -> str | None:
        if name.endswith("rotary_emb.inv_freq"):
            return None
        return {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}.get(name, name)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: BatchAttention,
    ) -> DraftOutput:
        x = self.fc(torch.cat((self.embed(input_ids), hidden_states), dim=-1))
        for layer in self.layers:
            x = layer(x, positions, attention)
        return DraftOutput(hidden_states=x, next_hidden_states=x)
