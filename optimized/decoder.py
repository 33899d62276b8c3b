"""The decoder of all dense families; with an MoE in place of the MLP also of MoE families.

Differs from reference: q, k and v come from one GEMM, and so do gate and up; one kernel norms and rotates the
heads of q and k and stores k and v; a GEMM that ends a block adds its result to the residual stream. After an
MoE, after split-K GEMMs of dozens of tokens, and with several ranks the next norm adds what is pending in the
`Stream`. A layer is five kernels and attention for a few tokens, seven for dozens in a small model, eight for
many. Where heads do not rotate, or neighbouring dimensions do together (GLM-4), norm, rotation and store are
kernels of their own. After attention, the last layer computes only the tokens whose hidden states are read:
the last token of each prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from diptych.optimized.layers import (
    MLP,
    Linear,
    MergedLinear,
    RotaryEmbedding,
    add_and_norm,
    is_builtin_layer,
    is_builtin_norm,
    logits,
    sum_later,
)
from diptych.optimized.mla.mla_model import MLAAttention
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces import layers as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers
from diptych.shared.interfaces.moe import MoE
from diptych.shared.loading.weights import load_weights, named_targets
from diptych.shared.modeling.decoder_modules import AttentionModules, CausalLMModules, LayerModules
from diptych.shared.modeling.stream import Stream
from diptych.shared.modeling.vocabulary import embed_rows, gather_logits


class DecoderAttention(AttentionModules):
    q_spacing = 1  # heads of q_proj from one of q to the next

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        layers: Layers,
        rotary_emb: interface.RotaryEmbedding,
        input_size: int | None = None,
    ) -> None:
        """`input_size`: of the rows that q, k and v are computed from; None: hidden_size."""
        super().__init__(config, layer_id, layers, rotary_emb)
        input_size = input_size or config.hidden_size
        q_size = config.num_qo_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(input_size, parts, config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        """x: from qkv_proj -> for o_proj, [num_tokens, num_qo_heads * head_dim]."""
        layer = self.layer if self.sinks is None else replace(self.layer, sinks=self.sinks)
        q_norm: Any = self.q_norm
        k_norm: Any = self.k_norm
        has_own_norms = q_norm is None or (is_builtin_norm(q_norm) and is_builtin_norm(k_norm))
        rotary_emb: Any = self.rotary_emb
        # --8<-- [start:attention-forward]
        if is_builtin_layer(rotary_emb, RotaryEmbedding) and rotary_emb.can_store and has_own_norms:
            q = rotary_emb.rotate_and_store(x, positions, q_norm, k_norm, attention, layer)
            return attention.backend.run(q, layer, attention.plan).flatten(1)
        q, k, v = self.split_heads(x)
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(q), k_norm(k)
        if rotary_emb is not None:
            q, k = rotary_emb(positions, q, k)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        return attention.backend.run(q, layer, attention.plan, k=k, v=v).flatten(1)
        # --8<-- [end:attention-forward]

    def split_heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x: from qkv_proj -> q, k, v, each [num_tokens, heads, head_dim]."""
        q, k, v = (part.unflatten(1, (-1, self.layer.head_dim)) for part in self.qkv_proj.split(x).values())
        return q[:, :: self.q_spacing], k, v


class DecoderLayer(LayerModules):
    attention_class: type[nn.Module] = DecoderAttention
    mla_class = MLAAttention
    mlp_class = MLP

    def forward(self, x: Stream, positions: torch.Tensor, attention: BatchAttention) -> Stream:
        """The last layer's output is that of the tokens attention.rows. The tensors of x may be
        overwritten."""
        return self.forward_through(self.self_attn, x, positions, attention)

    def forward_through(
        self, attend: Any, x: Stream, positions: torch.Tensor, attention: BatchAttention
    ) -> Stream:
        """attend: the module whose qkv_proj, forward and o_proj are the first half of the layer."""
        # --8<-- [start:decoder-layer]
        if x.pending is None:
            residual = x.residual
            qkv = attend.qkv_proj(residual, self.input_layernorm)
        else:
            normed, residual = add_and_norm(self.input_layernorm, x)
            qkv = attend.qkv_proj(normed)
        heads = attend(qkv, positions, attention)
        if self.is_last and attention.rows is not None:
            residual, heads = residual[attention.rows], heads[attention.rows]
        x = self._add_later(attend.o_proj, residual, heads)
        if isinstance(self.mlp, MoE):
            normed, residual = add_and_norm(self.post_attention_layernorm, x)
            return Stream(residual, sum_later(self.tp, self.mlp(normed)))
        if x.pending is None:
            residual = x.residual
            activated = self.mlp.activate(residual, self.post_attention_layernorm)
        else:
            normed, residual = add_and_norm(self.post_attention_layernorm, x)
            activated = self.mlp.activate(normed)
        return self._add_later(self.mlp.down_proj, residual, activated)
        # --8<-- [end:decoder-layer]

    def _add_later(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor) -> Stream:
        """Add as `Linear.add_later` does; with several ranks the next norm adds the sum over ranks."""
        if self.tp.size == 1:
            return linear.add_later(residual, x)
        return Stream(residual, sum_later(self.tp, linear(x)))


class DecoderForCausalLM(CausalLMModules):
    layer_class = DecoderLayer
    linear_class = Linear
    selects_rows = True
    is_deterministic = False

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor] | None = None,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        captured = captured or {}
        # A normal launch, so that kernels of the layers may read earlier data before their gdc_wait.
        embeds = self.embed(input_ids) if input_embeds is None else input_embeds
        first, *added = embeds.split(self.config.hidden_size, dim=1)
        x = Stream(first.contiguous())
        for layer_id, layer in enumerate(self.model.layers):
            if 0 < layer_id <= len(added):
                x = Stream(x.total() + added[layer_id - 1])
            if layer_id in captured:
                captured[layer_id] = x.copied_total()  # a layer may overwrite its input
            x = layer(x, positions, attention)
        if len(self.model.layers) in captured:
            captured[len(self.model.layers)] = x.copied_total()
        return add_and_norm(self.model.norm, x)[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.model.embed_tokens(input_ids)
        return embed_rows(self.model.embed_tokens, self.config.vocab_size, input_ids, self.tp)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.embed_tokens if self.lm_head is None else self.lm_head
        own = logits(hidden_states, head.weight, self.is_deterministic)
        return own if self.tp.size == 1 else gather_logits(own, self.config.vocab_size, self.tp)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if any(parameter.is_meta for parameter in self.parameters()):
            self.to_empty(device=torch.get_default_device())
        load_weights(weights, named_targets(self), self.config)
