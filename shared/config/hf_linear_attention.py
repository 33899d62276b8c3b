"""The linear attention in a config.json: Qwen3-Next, Qwen3.5, Kimi-Linear."""

from __future__ import annotations

from dataclasses import replace

from diptych.shared.config.fields import Fields
from diptych.shared.config.model import LinearAttentionConfig, ModelConfig

KIMI_KEYS = (
    ("model_max_length", "max_position_embeddings"),
    ("moe_renormalize", "norm_topk_prob"),
    ("moe_router_activation_func", "scoring_func"),
    ("num_expert_group", "n_group"),
    ("num_experts_per_token", "num_experts_per_tok"),
    ("num_shared_experts", "n_shared_experts"),
)
LAYER_TYPES = ("linear_attention", "full_attention")


def with_linear_attention(config: ModelConfig, fields: Fields) -> ModelConfig:
    """`config` with the layers of linear attention, and with the shared expert of the MoE layers."""
    linear = LinearAttentionConfig(
        num_k_heads=fields.integer("linear_num_key_heads"),
        num_v_heads=fields.integer("linear_num_value_heads"),
        k_head_dim=fields.integer("linear_key_head_dim"),
        v_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", minimum=2),
    )
    linear_layers = _linear_layers(fields, config.num_hidden_layers)
    if len(linear_layers) == config.num_hidden_layers:
        raise ValueError(f"{fields.where}: no layer has full attention; supported are models with both kinds")
    moe = config.moe
    if moe is not None:
        moe = replace(
            moe,
            norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
            shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
            shared_expert_gate=True,
        )
    return replace(
        config, moe=moe, attn_output_gate=True, linear_attention=linear, linear_layers=linear_layers
    )


def _linear_layers(fields: Fields, num_hidden_layers: int) -> frozenset[int]:
    if "layer_types" not in fields:
        every = fields.integer("full_attention_interval", default=4)
        return frozenset(i for i in range(num_hidden_layers) if (i + 1) % every != 0)
    types = fields.raw("layer_types", "a list")
    is_known = isinstance(types, list) and all(name in LAYER_TYPES for name in types)
    if not is_known or len(types) != num_hidden_layers:
        raise fields.error("layer_types", f"a list of {num_hidden_layers} names of {', '.join(LAYER_TYPES)}")
    return frozenset(i for i, name in enumerate(types) if name == "linear_attention")


def with_kimi_linear(config: ModelConfig, fields: Fields) -> ModelConfig:
    """`config` with the layers of KDA. The others have latent attention, none of them RoPE."""
    where, num_layers = f"{fields.where}: linear_attn_config", config.num_hidden_layers
    if not fields.boolean("mla_use_nope", default=True):
        raise fields.error("mla_use_nope", "true: latent attention without RoPE")
    kda = Fields(fields.raw("linear_attn_config", "an object"), where)
    num_heads, head_dim = kda.integer("num_heads"), kda.integer("head_dim")
    linear, full = (kda.integers(f"{kind}_layers") for kind in ("kda", "full_attn"))
    if sorted([*linear, *full]) != [*range(1, num_layers + 1)] or not full:
        raise ValueError(
            f"{where}: kda_layers and full_attn_layers must name layers 1 to {num_layers}, each once, and at "
            f"least one has full attention; they name {sorted(linear)!s:.60} and {sorted(full)!s:.60}"
        )
    return replace(
        config,
        linear_attention=LinearAttentionConfig(
            *(num_heads, num_heads, head_dim, head_dim),
            conv_kernel=kda.integer("short_conv_kernel_size", minimum=2),
            channel_decay=True,
        ),
        linear_layers=frozenset(layer - 1 for layer in linear),
        nope_layers=frozenset(range(num_layers)),
    )
