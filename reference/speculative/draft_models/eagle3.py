"""EAGLE-3: one decoder layer over the target's hidden states of several depths; often a smaller vocabulary.

Checkpoints hold fc, midlayer.* (or layers.0.*) and norm; perhaps lm_head, d2t, t2d and embed_tokens. d2t[i]
is how far the target's id is from the draft id i; t2d says which of the target's ids have one, as d2t does.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.reference.decoder import DecoderAttention
from diptych.reference.layers import MLP, Linear
from diptych.shared.config import DraftConfig, ModelConfig
from diptych.shared.interfaces import MoE
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.draft_model import DraftOutput
from diptych.shared.interfaces.layers import Layers, RotaryEmbedding
from diptych.shared.speculation.draft_model_base import BaseDraftModel


class Eagle3Attention(DecoderAttention):
    """Attention whose queries, keys and values are computed from the concatenation of token embedding and
    hidden state."""

    def __init__(
        self, config: ModelConfig, layer_id: int, layers: Layers, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__(config, layer_id, layers, rotary_emb)
        for name in ("q_proj", "k_proj", "v_proj"):
            num_out = getattr(self, name).weight.shape[0]
            setattr(self, name, Linear(2 * config.hidden_size, num_out, config.qkv_bias))


class Eagle3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layers: Layers, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        rotary_emb = layers.RotaryEmbedding(config.rope, config.head_dim, config.context_len)
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config, 0, layers, rotary_emb)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, layers.SiluAndMul)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden_states)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        residual = normed if self.norm_before_residual else hidden_states
        x = residual + self.self_attn(x, positions, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Model(BaseDraftModel):
    def __init__(self, config: DraftConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__(config, layers, moe)
        model = config.model
        self.fc = Linear(config.target_hidden_size, model.hidden_size, bias=True)
        self.midlayer = Eagle3DecoderLayer(model, layers, config.norm_before_residual)
        self.norm = layers.RMSNorm(model.hidden_size, model.rms_norm_eps)

    def canonical_name(self, name: str) -> str | None:
        if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
            return None
        if name.startswith("layers.0."):
            return name.replace("layers.0", "midlayer", 1)
        return {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}.get(name, name)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: BatchAttention,
    ) -> DraftOutput:
        # --8<-- [start:eagle3-forward]
        if hidden_states.shape[-1] == self.config.target_hidden_size:
            hidden_states = self.fc(hidden_states)
        x = self.midlayer(self.embed(input_ids), hidden_states, positions, attention)
        # Drafting continues from states before the norm, like those of the target's layers.
        return DraftOutput(hidden_states=self.norm(x), next_hidden_states=x)
        # --8<-- [end:eagle3-forward]
