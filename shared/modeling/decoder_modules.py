"""The modules of a decoder, with the names of Hugging Face's weights. A panel adds the
linear layers of attention and of the MLP, and the forward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.interfaces.layers import Layers, RMSNorm, RotaryEmbedding
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.interfaces.moe import MoE
from diptych.shared.modeling.forward import soft_cap
from diptych.shared.modeling.vocabulary import vocabulary_rows
from diptych.shared.parallel.alone import ALONE
from diptych.shared.types.attention import AttentionLayer


class AttentionModules(nn.Module):
    """Norms of the heads of q and k, rotation, and sinks, where the config has them."""

    tp: Collectives = ALONE  # the ranks that have the other heads

    def __init__(
        self, config: ModelConfig, layer_id: int, layers: Layers, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__()
        norm = norm_class(config, layers)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            num_q, num_k = (config.num_qo_heads, config.num_kv_heads) if config.wide_qk_norm else (1, 1)
            self.q_norm = norm(num_q * config.head_dim, config.rms_norm_eps)
            self.k_norm = norm(num_k * config.head_dim, config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        self.layer = AttentionLayer(
            layer_id=config.layer_of_kind(layer_id),
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


class LayerModules(nn.Module):
    """Attention, MLP or MoE, and the norms around them. `post_attention_layernorm` is the one
    before the MLP. Families that have norms behind attention and MLP call one of these so: their rows of
    `FAMILIES` rename it."""

    attention_class: type[nn.Module]
    mla_class: type[nn.Module]
    mlp_class: type[nn.Module]
    linear_attention_class: type[nn.Module]  # of families that have it
    input_layernorm: RMSNorm  # those of `ModelConfig.layer_norms`
    post_attention_layernorm: RMSNorm
    post_self_attn_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

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
        self.is_last = layer_id == config.num_hidden_layers - 1
        config = config.of_layer(layer_id)
        norm, sizes = norm_class(config, layers), (config.hidden_size, config.rms_norm_eps)
        attention = self.attention_class if config.mla is None else self.mla_class
        for name in config.layer_norms:
            setattr(self, name, norm(*sizes))
        self.self_attn: Any = None
        self.linear_attn: Any = None
        if layer_id in config.linear_layers:
            self.linear_attn = self.linear_attention_class(config, layer_id)
        else:
            self.self_attn = attention(config, layer_id, layers, rotary_emb)
            self.self_attn.tp = tp
        self.mlp: Any
        experts = config.moe if layer_id in config.moe_layers else None
        if experts is not None and not experts.beside_mlp:
            self.mlp = moe(experts, config.hidden_size)
        else:
            act_fn = act_fn_class(config, layers)
            self.mlp = self.mlp_class(config.hidden_size, config.intermediate_size, config.mlp_bias, act_fn)


class BodyModules(nn.Module):
    """The model without the head. With several ranks each has some rows of the embedding."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Layers,
        moe: type[MoE],
        tp: Collectives,
        layer_class: type[LayerModules],
    ) -> None:
        super().__init__()
        rows = vocabulary_rows(config.vocab_size, tp.rank, tp.size)
        embedding = torch.empty(rows.stop - rows.start, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)
        ropes = [
            (config.layer_rope(layer_id), config.of_layer(layer_id).head_dim)
            for layer_id in range(config.num_hidden_layers)
        ]
        rotary_embs: dict[Any, Any] = {
            (rope, head_dim): rope and layers.RotaryEmbedding(rope, head_dim, config.context_len)
            for rope, head_dim in set(ropes)
        }
        self.layers = nn.ModuleList(
            layer_class(config, layer_id, layers, moe, rotary_embs[rope], tp)
            for layer_id, rope in enumerate(ropes)
        )
        self.norm = norm_class(config, layers)(config.hidden_size, config.rms_norm_eps)


class CausalLMModules(CausalLM):
    """The body and the head."""

    layer_class: type[LayerModules]
    linear_class: type[nn.Module]

    def __init__(self, config: ModelConfig, layers: Layers, moe: type[MoE], tp: Collectives = ALONE) -> None:
        super().__init__(config, layers, moe)
        self.config = config
        self.tp = tp
        self.model = BodyModules(config, layers, moe, tp, self.layer_class)
        # A tied head is the embedding itself.
        num_rows = self.model.embed_tokens.num_embeddings
        self.lm_head: Any = None
        if not config.tie_word_embeddings:
            self.lm_head = self.linear_class(config.hidden_size, num_rows)


class GemmaEnds(CausalLM):
    """A scaled embedding and soft-capped logits, before the classes of a panel's decoder."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings times the square root of hidden_size, rounded to the embedding's type."""
        x = super().embed(input_ids)  # type: ignore[safe-super]
        return x * torch.tensor(x.shape[-1] ** 0.5, dtype=x.dtype, device="cpu").item()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)  # type: ignore[safe-super]
        return soft_cap(logits, self.config.final_logit_cap)


# --8<-- [start:norm-over-ranks]
def norm_over_ranks(norm: RMSNorm, x: torch.Tensor, tp: Collectives) -> torch.Tensor:
    """The norm of rows of which each rank has equally many columns: x
    [num_tokens, columns]. With one rank norm(x)."""
    if tp.size == 1:
        return norm(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = tp.all_reduce(wide.square().mean(dim=-1, keepdim=True) / tp.size)
    return norm.weight * (wide * (mean + norm.eps).rsqrt()).to(x.dtype)
    # --8<-- [end:norm-over-ranks]


def norm_class(config: ModelConfig, layers: Layers) -> type[RMSNorm]:
    return _find(layers, "GemmaRMSNorm", config) if config.norm_unit_offset else layers.RMSNorm


def act_fn_class(config: ModelConfig, layers: Layers) -> type[nn.Module]:
    return _find(layers, "GeluTanhAndMul", config) if config.hidden_act == "gelu_tanh" else layers.SiluAndMul


def _find(layers: Any, name: str, config: ModelConfig) -> Any:
    """Find a class, which a user-provided module may lack."""
    if not hasattr(layers, name):
        raise ValueError(
            f"the layers of {getattr(layers, '__name__', layers)} have no {name}, which a "
            f"{config.architecture} needs: add one, or use layers=reference"
        )
    return getattr(layers, name)
