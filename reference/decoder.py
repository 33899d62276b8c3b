"""The decoder of all dense families; with an MoE in place of the MLP also of MoE families.

The features of a family are fields of ModelConfig: biases, norms on the heads of q and k, sliding windows,
experts. The files in models/ are of the families whose forward pass differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from diptych.reference.layers import MLP, Linear
from diptych.reference.mla.mla_model import MLAAttention
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.interfaces.layers import Layers, RotaryEmbedding
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.interfaces.moe import MoE
from diptych.shared.loading.weights import load_weights, named_targets
from diptych.shared.modeling.layer_choice import act_fn_class, norm_class
from diptych.shared.modeling.vocabulary import embed_rows, gather_logits, vocabulary_rows
from diptych.shared.parallel.alone import ALONE
from diptych.shared.types.attention import AttentionLayer


class DecoderAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_id: int, layers: Layers, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__()
        q_size = config.num_qo_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias)
        norm = norm_class(config, layers)
        self.q_norm = norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.rotary_emb = rotary_emb
        self.layer = AttentionLayer(
            layer_id=layer_id,
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attn_scale or config.head_dim**-0.5,
            sliding_window=config.sliding_window(layer_id),
            attention_chunk=config.attention_chunk(layer_id),
            logit_cap=config.attn_logit_cap,
        )
        self.sinks: nn.Parameter | None = None
        if config.attn_sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_qo_heads), requires_grad=False)

    # --8<-- [start:attention-forward]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        layer = self.layer if self.sinks is None else replace(self.layer, sinks=self.sinks)
        q = self.q_proj(x).view(-1, layer.num_qo_heads, layer.head_dim)
        k = self.k_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        v = self.v_proj(x).view(-1, layer.num_kv_heads, layer.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        attention.kv_pool.store(layer.layer_id, attention.out_cache_loc, k, v)
        output = attention.backend.run(q, layer, attention.plan, k=k, v=v)
        return self.o_proj(output.flatten(1))
        # --8<-- [end:attention-forward]


class DecoderLayer(nn.Module):
    attention_class: type[DecoderAttention] = DecoderAttention

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        layers: Layers,
        moe: type[MoE],
        rotary_emb: RotaryEmbedding,
        tp: Collectives = ALONE,
    ) -> None:
        super().__init__()
        self.tp = tp
        norm = norm_class(config, layers)
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        attention = self.attention_class if config.mla is None else MLAAttention
        self.self_attn = attention(config, layer_id, layers, rotary_emb)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module
        if config.moe is not None and layer_id in config.moe_layers:
            self.mlp = moe(config.moe, config.hidden_size)
        else:
            act_fn = act_fn_class(config, layers)
            self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, act_fn)

    # --8<-- [start:decoder-layer]
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: BatchAttention) -> torch.Tensor:
        heads = self.self_attn(self.input_layernorm(x), positions, attention)
        x = x + self.tp.all_reduce(heads)  # each rank has some of the heads
        hidden = self.mlp(self.post_attention_layernorm(x))
        return x + self.tp.all_reduce(hidden)  # and a part of the intermediate size
        # --8<-- [end:decoder-layer]


class DecoderModel(nn.Module):
    """The model without the head. With several ranks each has some rows of the embedding."""

    layer_class: type[nn.Module] = DecoderLayer

    def __init__(self, config: ModelConfig, layers: Layers, moe: type[MoE], tp: Collectives) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = config.vocab_size
        rows = vocabulary_rows(config.vocab_size, tp.rank, tp.size)
        embedding = torch.empty(rows.stop - rows.start, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)
        ropes = [config.layer_rope(layer_id) for layer_id in range(config.num_hidden_layers)]
        rotary_embs = {
            rope: rope and layers.RotaryEmbedding(rope, config.head_dim, config.context_len)
            for rope in set(ropes)
        }
        self.layers = nn.ModuleList(
            self.layer_class(config, layer_id, layers, moe, rotary_embs[rope], tp)
            for layer_id, rope in enumerate(ropes)
        )
        self.norm = norm_class(config, layers)(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size]: the input of layer 0. `captured`: see CausalLM."""
        # --8<-- [start:model-forward]
        for layer_id, layer in enumerate(self.layers):
            if layer_id in captured:
                captured[layer_id] = x
            x = layer(x, positions, attention)
        if len(self.layers) in captured:
            captured[len(self.layers)] = x
        return self.norm(x)
        # --8<-- [end:model-forward]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.embed_tokens(input_ids)
        return embed_rows(self.embed_tokens, self.vocab_size, input_ids, self.tp)


class DecoderForCausalLM(CausalLM):
    body_class: type[DecoderModel] = DecoderModel

    def __init__(self, config: ModelConfig, layers: Layers, moe: type[MoE], tp: Collectives = ALONE) -> None:
        super().__init__(config, layers, moe)
        self.config = config
        self.tp = tp
        self.model = self.body_class(config, layers, moe, tp)
        # A tied head is the embedding itself.
        num_rows = self.model.embed_tokens.num_embeddings
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, num_rows)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor] | None = None,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(input_ids) if input_embeds is None else input_embeds
        return self.model(x, positions, attention, captured or {})

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(hidden_states, head.weight).to(torch.float32)
        return logits if self.tp.size == 1 else gather_logits(logits, self.config.vocab_size, self.tp)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if any(parameter.is_meta for parameter in self.parameters()):
            self.to_empty(device=torch.get_default_device())
        load_weights(weights, named_targets(self), self.config)
