"""What single families add to a ModelConfig, a few lines each."""

from __future__ import annotations

from dataclasses import replace

from diptych.shared.config.fields import Fields
from diptych.shared.config.model import ModelConfig, RopeConfig


def with_nope_layers(config: ModelConfig, fields: Fields) -> ModelConfig:
    """SmolLM3. no_rope_layers has 1 for a layer with RoPE, and 0 for one without."""
    layers = range(config.num_hidden_layers)
    interval = fields.integer("no_rope_layer_interval", default=4)
    has_rope = fields.integers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in layers]
    if len(has_rope) != len(layers):
        raise ValueError(
            f"{fields.where}: no_rope_layers has {len(has_rope)} entries, num_hidden_layers is {len(layers)}"
        )
    return replace(config, nope_layers=frozenset(layer for layer in layers if not has_rope[layer]))


def with_interleaved_rope(config: ModelConfig, fields: Fields) -> ModelConfig:
    """GLM-4."""
    return replace(config, rope=replace(config.rope, is_interleaved=True))


def with_glm4_moe(config: ModelConfig, fields: Fields) -> ModelConfig:
    """GLM-4.5 to 4.7. The larger models have norms on the heads of q and k."""
    return replace(config, qk_norm=fields.boolean("use_qk_norm", default=False))


def with_granite(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(
        config,
        attn_scale=fields.number("attention_multiplier", default=1.0),
        embed_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logits_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )


def with_plain_local_rope(config: ModelConfig, fields: Fields) -> ModelConfig:
    """OLMo-3. The scaling of RoPE is of the layers without a window alone."""
    return replace(config, local_rope=RopeConfig("default", config.rope.theta, config.rope.rotary_dim))


def with_minimax(config: ModelConfig, fields: Fields) -> ModelConfig:
    """MiniMax-M2. Its config.json gives the number of dimensions that rotate, or their share."""
    if not fields.boolean("use_qk_norm", default=True):
        raise ValueError(f"{fields.where}: use_qk_norm is false; supported is true")
    rotary_dim = fields.integer("rotary_dim", default=config.rope.rotary_dim)
    if rotary_dim % 2 or rotary_dim > config.head_dim:
        raise ValueError(
            f"{fields.where}: rotary_dim is {rotary_dim}; it must be even and at most head_dim, "
            f"{config.head_dim}"
        )
    return replace(config, rope=replace(config.rope, rotary_dim=rotary_dim))
