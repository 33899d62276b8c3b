"""EAGLE-3: one decoder layer over the target's hidden states at several depths.

Differs from reference: as the target's layers (models/llama.py): q, k and v come from one GEMM, and so do
gate and up; one kernel rotates heads and stores k and v; the GEMMs that end a block add to the residual
stream, so the layer's output is one tensor; logits are not rounded on the way to float32. Assumes the
panel's layers; with others it runs too, one kernel after the other.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.optimized.decoder import DecoderAttention
from diptych.optimized.layers import MLP, Linear, MergedLinear, logits
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
        self.qkv_proj = MergedLinear(2 * config.hidden_size, self.qkv_proj.parts, config.qkv_bias)


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
        """The layer's output. `hidden_states` may be overwritten."""
        normed = self.hidden_norm(hidden_states)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        heads = self.self_attn(self.self_attn.qkv_proj(x), positions, attention)
        if self.norm_before_residual:
            hidden_states = normed
        hidden_states = self.self_attn.o_proj.add_to(hidden_states, heads)
        activated = self.mlp.activate(hidden_states, self.post_attention_layernorm)
        return self.mlp.down_proj.add_to(hidden_states, activated)


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
        else:
            hidden_states = hidden_states.clone()  # the caller's, and the layer writes over it
        hidden_states = self.midlayer(self.embed(input_ids), hidden_states, positions, attention)
        return DraftOutput(self.norm(hidden_states), hidden_states)
        # --8<-- [end:eagle3-forward]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (
            super().compute_logits(hidden_states) if self.head is None else logits(hidden_states, self.head)
        )
