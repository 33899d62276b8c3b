"""EAGLE-3: one decoder layer over the target's hidden states of several depths; often a smaller vocabulary.

Checkpoints hold fc, midlayer.* (or layers.0.*) and norm; perhaps lm_head, d2t, t2d and embed_tokens. d2t[i]
is how far the target's id is from the draft id i; t2d says which of the target's ids have one, as d2t does.
Some have a norm before fc: input_norm, or fc_norm.i for each layer of the target. A head that takes the
target's hidden states after the final norm has no fc.
"""

from __future__ import annotations

import torch

from diptych.reference.decoder import DecoderAttention
from diptych.reference.layers import MLP, Linear
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.draft_model import DraftOutput
from diptych.shared.speculation.eagle3_modules import Eagle3LayerModules, Eagle3Modules


class Eagle3DecoderLayer(Eagle3LayerModules):
    attention_class = DecoderAttention
    mlp_class = MLP

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


class Eagle3Model(Eagle3Modules):
    layer_class = Eagle3DecoderLayer
    linear_class = Linear

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: BatchAttention,
    ) -> DraftOutput:
        # --8<-- [start:eagle3-forward]
        hidden_states = self.fuse(hidden_states)
        x = self.midlayer(self.embed(input_ids), hidden_states, positions, attention)
        normed = self.norm(x)
        # Most heads continue from states before the norm, like those of the target's layers.
        return DraftOutput(hidden_states=normed, next_hidden_states=normed if self.config.norms.output else x)
        # --8<-- [end:eagle3-forward]
