"""What the DFlash models of both panels have in common: modules, and the names of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diptych.shared.config import DraftConfig
from diptych.shared.interfaces import BlockDraftModel, MoE
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers
from diptych.shared.modeling.decoder_modules import LayerModules
from diptych.shared.speculation.draft_model_base import BaseDraftModel


class DFlashModules(BaseDraftModel, BlockDraftModel):
    layer_class: type[LayerModules]
    linear_class: type[nn.Module]

    def __init__(self, config: DraftConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__(config, layers, moe)
        model = config.model
        rotary_emb = layers.RotaryEmbedding(model.rope, model.head_dim, model.context_len)
        self.fc = self.linear_class(config.target_hidden_size, model.hidden_size)
        self.hidden_norm = layers.RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.layers = nn.ModuleList(
            self.layer_class(model, layer_id, layers, moe, rotary_emb)
            for layer_id in range(model.num_hidden_layers)
        )
        self.norm = layers.RMSNorm(model.hidden_size, model.rms_norm_eps)

    def canonical_name(self, name: str) -> str | None:
        if name.endswith("rotary_emb.inv_freq"):
            return None
        return {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}.get(name, name)

    # --8<-- [start:store-features]
    def store_features(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, attention: BatchAttention
    ) -> None:
        features = self.hidden_norm(self.fc(hidden_states))
        layer: Any
        for layer in self.layers:
            layer.self_attn.store(features, positions, attention)

    # --8<-- [end:store-features]
