"""The linear attention in a config.json: Qwen3-Next, Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

from diptych.shared.config.fields import Fields
from diptych.shared.config.model import LinearAttentionConfig, ModelConfig

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
