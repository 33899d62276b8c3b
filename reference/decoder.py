"""The decoder of all dense families; with an MoE in place of the MLP also of MoE families.

The features of a family are fields of ModelConfig: biases, norms on the heads of q and k, sliding windows,
experts. The files in models/ are of the families whose forward pass differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diptych.reference.layers import MLP, Linear
from diptych.reference.mla.mla_model import MLAAttention
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers, RotaryEmbedding
from diptych.shared.loading.weights import load_weights, named_targets
from diptych.shared.modeling.decoder_modules import AttentionModules, CausalLMModules, LayerModules
from diptych.shared.modeling.vocabulary import embed_rows, gather_logits


class DecoderAttention(AttentionModules):
    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        layers: Layers,
        rotary_emb: RotaryEmbedding,
        input_size: int | None = None,
    ) -> None:
        """`input_size`: of the rows that q, k and v are computed from; None: hidden_size."""
        super().__init__(config, layer_id, layers, rotary_emb)
        input_size = input_size or config.hidden_size
        q_size = config.num_qo_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(input_size, q_size, config.qkv_bias)
        self.k_proj = Linear(input_size, kv_size, config.qkv_bias)
        self.v_proj = Linear(input_size, kv_size, config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        layer = self.layer if self.sinks is None else replace(self.layer, sinks=self.sinks)
        # --8<-- [start:attention-forward]
        q = self.q_proj(x).view(-1, layer.num_qo_heads, layer.head_dim)
        k = self.k_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        v = self.v_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        output = attention.backend.run(q, layer, attention.plan, k=k, v=v)
        return self.o_proj(output.flatten(1))
        # --8<-- [end:attention-forward]


class DecoderLayer(LayerModules):
    attention_class: type[nn.Module] = DecoderAttention
    mla_class = MLAAttention
    mlp_class = MLP

    # --8<-- [start:decoder-layer]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        heads = self.self_attn(self.input_layernorm(x), positions, attention)
        x = x + self.tp.all_reduce(heads)  # each rank has some of the heads
        hidden = self.mlp(self.post_attention_layernorm(x))
        return x + self.tp.all_reduce(hidden)  # and a part of the intermediate size
        # --8<-- [end:decoder-layer]


class DecoderForCausalLM(CausalLMModules):
    layer_class: type[LayerModules] = DecoderLayer
    linear_class = Linear

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor] | None = None,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        captured = captured or {}
        embeds = self.embed(input_ids) if input_embeds is None else input_embeds
        x, *added = embeds.split(self.config.hidden_size, dim=1)
        for layer_id, layer in enumerate(self.model.layers):
            if 0 < layer_id <= len(added):
                x = x + added[layer_id - 1]
            if layer_id in captured:
                captured[layer_id] = x
            x = layer(x, positions, attention)
        if len(self.model.layers) in captured:
            captured[len(self.model.layers)] = x
        return self.model.norm(x)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.model.embed_tokens(input_ids)
        return embed_rows(self.model.embed_tokens, self.config.vocab_size, input_ids, self.tp)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(hidden_states, head.weight).to(torch.float32)
        return logits if self.tp.size == 1 else gather_logits(logits, self.config.vocab_size, self.tp)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if any(parameter.is_meta for parameter in self.parameters()):
            self.to_empty(device=torch.get_default_device())
        load_weights(weights, named_targets(self), self.config)
