"""NEXTN, also called MTP (multi-token prediction): a layer that predicts the token after next, published with
some models.

Checkpoints name it as DeepSeek's do: layers.N.* with enorm, hnorm, eh_proj, one decoder layer,
shared_head.norm, and perhaps copies of the target's embedding (embed_tokens) and head (shared_head.head).
N is any one number. Qwen's names for the same (mtp.*) are translated when they are read. The decoder layer is
that of the family.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from diptych.reference.layers import Linear
from diptych.reference.models import model_class
from diptych.shared.config import DraftConfig
from diptych.shared.interfaces import MoE
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.draft_model import DraftOutput, StepDraftModel
from diptych.shared.interfaces.layers import Layers
from diptych.shared.modeling.decoder_modules import norm_class
from diptych.shared.speculation.draft_model_base import BaseDraftModel

_LAYER = re.compile(r"layers\.\d+\.(.*)")
_NAMES = {
    "embed_tokens.weight": "embedding",
    "shared_head.head.weight": "head",
    "shared_head.norm.weight": "norm.weight",
}


class NextNModel(BaseDraftModel, StepDraftModel):
    def __init__(self, config: DraftConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__(config, layers, moe)
        model = config.model
        rotary_emb = layers.RotaryEmbedding(model.rope, model.head_dim, model.context_len)
        norm = norm_class(model, layers)
        self.enorm = norm(model.hidden_size, model.rms_norm_eps)
        self.hnorm = norm(model.hidden_size, model.rms_norm_eps)
        self.eh_proj = Linear(model.hidden_size + config.target_hidden_size, model.hidden_size)
        of_target: Any = model_class(model.architecture.removesuffix("NextN"))
        self.decoder = of_target.layer_class(model, 0, layers, moe, rotary_emb)
        self.norm = norm(model.hidden_size, model.rms_norm_eps)

    def canonical_name(self, name: str) -> str | None:
        if name.endswith("rotary_emb.inv_freq"):
            return None
        if match := _LAYER.fullmatch(name):
            name = match.group(1)
        if name in _NAMES:
            return _NAMES[name]
        is_of_decoder = name.startswith(
            ("input_layernorm.", "self_attn.", "post_attention_layernorm.", "mlp.")
        )
        return f"decoder.{name}" if is_of_decoder else name

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: BatchAttention,
    ) -> DraftOutput:
        embeds = self.enorm(self.embed(input_ids))
        x = self.eh_proj(torch.cat((embeds, self.hnorm(hidden_states)), dim=-1))
        x = self.norm(self.decoder(x, positions, attention))
        # Like the target's, its hidden states are those after the norm.
        return DraftOutput(hidden_states=x, next_hidden_states=x)
