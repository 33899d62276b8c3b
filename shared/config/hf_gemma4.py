"""The config.json of Gemma-4 (text): layers with and without a sliding window differ in other sizes, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.shared.config.fields import Fields
from diptych.shared.config.hf_rope import parse_rope
from diptych.shared.config.model import KVHeads, ModelConfig, MoEConfig


def with_gemma4(config: ModelConfig, fields: Fields) -> ModelConfig:
    # The last layer sees all tokens, whatever layer_types says.
    config = replace(config, sliding_windows=(*config.sliding_windows[:-1], -1), attn_scale=1.0)
    is_full = [window < 0 for window in config.sliding_windows]
    kv_heads = _kv_heads(config, fields, is_full)
    full_dims = {heads.head_dim for heads, full in zip(kv_heads, is_full) if full}
    local_dims = {heads.head_dim for heads, full in zip(kv_heads, is_full) if not full}
    if len(full_dims) > 1 or local_dims - {config.head_dim}:
        raise ValueError(
            f"{fields.where}: per_layer_config has head_dim {sorted(full_dims)} in layers of full attention, "
            f"{sorted(local_dims)} in the others; supported is one of the first, and in the others head_dim, "
            f"{config.head_dim}"
        )
    num_shared = _num_kv_shared_layers(fields, is_full)
    num_own = config.num_hidden_layers - num_shared
    sizes = [config.intermediate_size] * num_own
    is_wide = fields.boolean("use_double_wide_mlp", default=False)
    sizes += [config.intermediate_size * (2 if is_wide else 1)] * num_shared
    has_equal_kv = fields.boolean("attention_k_eq_v", default=False)
    moe = _experts(config, fields) if fields.boolean("enable_moe_block", default=False) else None
    return replace(
        config,
        moe=moe,
        moe_layers=frozenset(range(config.num_hidden_layers) if moe is not None else ()),
        rope=parse_rope(fields, full_dims.pop(), config.rope.theta, True, 0.25, "proportional"),
        kv_heads=kv_heads,
        k_eq_v_layers=frozenset(i for i in range(num_own) if has_equal_kv and is_full[i]),
        num_kv_shared_layers=num_shared,
        intermediate_sizes=tuple(sizes),
        layer_scalar=True,
        layer_input_size=_layer_input_size(config, fields),
    )


def _experts(config: ModelConfig, fields: Fields) -> MoEConfig:
    """The experts that each layer has beside its MLP."""
    num_experts, num_chosen = fields.integer("num_experts"), fields.integer("top_k_experts")
    if num_chosen > num_experts:
        raise ValueError(f"{fields.where}: top_k_experts ({num_chosen}) exceeds num_experts ({num_experts})")
    return MoEConfig(
        num_experts,
        num_chosen,
        fields.integer("moe_intermediate_size"),
        norm_topk_prob=True,
        hidden_act=config.hidden_act,
        beside_mlp=True,
    )


def _kv_heads(config: ModelConfig, fields: Fields, is_full: list[bool]) -> tuple[KVHeads, ...]:
    """The KV heads of each layer. Checkpoints have keys for the layers of full attention, and transformers
    from 5.24 on writes per_layer_config."""
    plain = KVHeads(config.num_kv_heads, config.head_dim)
    full = KVHeads(config.num_kv_heads, fields.integer("global_head_dim", default=512))
    if fields.boolean("attention_k_eq_v", default=False):
        num = fields.integer("num_global_key_value_heads", default=config.num_kv_heads)
        full = full._replace(num_kv_heads=num)
    found = [full if here else plain for here in is_full]
    if "per_layer_config" in fields:
        by_layer: Any = Fields(fields.values["per_layer_config"], f"{fields.where}, per_layer_config")
        found = [_own_heads(by_layer, layer_id, plain) for layer_id in range(len(is_full))]
    for heads in found:
        if config.num_qo_heads % heads.num_kv_heads != 0 or heads.head_dim % 2 != 0:
            raise ValueError(
                f"{fields.where}: {heads.num_kv_heads} KV heads of {heads.head_dim} numbers in a layer with "
                f"{config.num_qo_heads} query heads; their number must divide it, and their size be even"
            )
    return tuple(found)


def _own_heads(by_layer: Fields, layer_id: int, plain: KVHeads) -> KVHeads:
    own = Fields(by_layer.raw(str(layer_id), "an object", {}), f"{by_layer.where}, {layer_id}")
    return KVHeads(
        own.integer("num_key_value_heads", default=plain.num_kv_heads),
        own.integer("head_dim", default=plain.head_dim),
    )


def _num_kv_shared_layers(fields: Fields, is_full: list[bool]) -> int:
    num_shared: int = fields.integer("num_kv_shared_layers", default=0, minimum=0)
    num_own = len(is_full) - num_shared
    if num_own < 1 or set(is_full[:num_own]) != set(is_full):
        raise ValueError(
            f"{fields.where}: num_kv_shared_layers is {num_shared} of {len(is_full)} layers; before them "
            "must be a layer of each kind that they have, with a sliding window or without"
        )
    return num_shared


def _layer_input_size(config: ModelConfig, fields: Fields) -> int:
    size: int = fields.integer("hidden_size_per_layer_input", default=256, minimum=0)
    vocab_size = fields.integer("vocab_size_per_layer_input", default=262_144)
    if size > 0 and vocab_size != config.vocab_size:
        raise ValueError(
            f"{fields.where}: vocab_size_per_layer_input is {vocab_size}; supported is vocab_size, "
            f"{config.vocab_size}"
        )
    return size
