"""What the EAGLE-3 models of both panels have in common: modules, and the names of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diptych.shared.config import DraftConfig, ModelConfig
from diptych.shared.interfaces import MoE, StepDraftModel
from diptych.shared.interfaces.layers import Layers
from diptych.shared.speculation.draft_model_base import BaseDraftModel


class Eagle3LayerModules(nn.Module):
    """Attention's queries, keys and values come from token embedding and hidden state, side by side."""

    attention_class: type[nn.Module]
    mlp_class: type[nn.Module]

    def __init__(self, config: ModelConfig, layers: Layers, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        rotary_emb = layers.RotaryEmbedding(config.rope, config.head_dim, config.context_len)
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: Any = self.attention_class(config, 0, layers, rotary_emb, 2 * config.hidden_size)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: Any = self.mlp_class(
            config.hidden_size, config.intermediate_size, config.mlp_bias, layers.SiluAndMul
        )


class Eagle3Modules(BaseDraftModel, StepDraftModel):
    layer_class: type[Eagle3LayerModules]
    linear_class: type[nn.Module]

    def __init__(self, config: DraftConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__(config, layers, moe)
        model, norms, num_layers = config.model, config.norms, len(config.target_layers)
        self.fc = self.input_norm = self.fc_norm = None
        if config.target_layers:
            self.fc = self.linear_class(config.target_hidden_size, model.hidden_size, bias=True)
        if norms.fusion == "joint":
            self.input_norm = layers.RMSNorm(config.target_hidden_size, model.rms_norm_eps)
        elif norms.fusion == "per layer":
            width = config.target.hidden_size
            self.fc_norm = nn.ModuleList(layers.RMSNorm(width, model.rms_norm_eps) for _ in range(num_layers))
        self.midlayer = self.layer_class(model, layers, norms.before_residual)
        self.norm = layers.RMSNorm(model.hidden_size, model.rms_norm_eps)

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, target_hidden_size] -> [n, hidden_size]: the streams of the target's layers become one. The
        head's own hidden states, and the target's after its final norm, come back as they are."""
        if self.fc is None or hidden_states.shape[-1] != self.config.target_hidden_size:
            return hidden_states
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)
        elif self.fc_norm is not None:
            parts = hidden_states.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts)]
            hidden_states = torch.cat(normed, dim=-1)
        fused: torch.Tensor = self.fc(hidden_states)
        return fused

    def canonical_name(self, name: str) -> str | None:
        if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
            return None
        if name.startswith("layers.0."):
            return name.replace("layers.0", "midlayer", 1)
        return {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}.get(name, name)
