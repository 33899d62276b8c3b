"""EAGLE-3: one decoder layer over the target's hidden states at several depths.

Differs from reference: as the target's layers (decoder.py): q, k and v come from one GEMM, and so do
gate and up; one kernel rotates heads and stores k and v; the GEMMs that end a block add to the residual
stream, so the layer's output is one tensor; logits are not rounded on the way to float32. Assumes the
panel's layers; with others it runs too, one kernel after the other.
"""

from __future__ import annotations

import torch

from diptych.optimized.decoder import DecoderAttention
from diptych.optimized.layers import MLP, Linear, logits
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
        """The layer's output. `hidden_states` may be overwritten."""
        normed = self.hidden_norm(hidden_states)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        heads = self.self_attn(self.self_attn.qkv_proj(x), positions, attention)
        if self.norm_before_residual:
            hidden_states = normed
        hidden_states = self.self_attn.o_proj.add_to(hidden_states, heads)
        activated = self.mlp.activate(hidden_states, self.post_attention_layernorm)
        return self.mlp.down_proj.add_to(hidden_states, activated)


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
        fused = self.fuse(hidden_states)
        if fused is hidden_states:
            fused = hidden_states.clone()  # the caller's, and the layer writes over it
        x = self.midlayer(self.embed(input_ids), fused, positions, attention)
        normed = self.norm(x)
        return DraftOutput(normed, normed if self.config.norms.output else x)
        # --8<-- [end:eagle3-forward]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (
            super().compute_logits(hidden_states) if self.head is None else logits(hidden_states, self.head)
        )
