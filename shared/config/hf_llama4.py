"""What Llama-4's text model adds to a decoder: layers without RoPE, chunks, and its experts."""

from __future__ import annotations

from dataclasses import replace

from diptych.shared.config.fields import Fields
from diptych.shared.config.model import AttnTemperature, ModelConfig, MoEConfig


def with_llama4(config: ModelConfig, fields: Fields) -> ModelConfig:
    layers = range(config.num_hidden_layers)
    has_rope = fields.integers("no_rope_layers")  # 1: has RoPE, 0: has none
    interval = fields.integer("no_rope_layer_interval", default=4)
    has_rope = has_rope or [int((layer + 1) % interval != 0) for layer in layers]
    by_default = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
    kinds = fields.raw("layer_types", "a list", default=by_default)
    known = ("chunked_attention", "full_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise fields.error("layer_types", "a list of chunked_attention or full_attention")
    for name, values in (("no_rope_layers", has_rope), ("layer_types", kinds)):
        if len(values) != len(layers):
            raise ValueError(
                f"{fields.where}: {name} has {len(values)} entries, num_hidden_layers is {len(layers)}"
            )
    chunk = fields.integer("attention_chunk_size", default=8192)
    temperature = AttnTemperature(
        fields.integer("floor_scale", default=8192), fields.number("attn_scale", default=0.1)
    )
    return replace(
        config,
        rope=replace(config.rope, is_interleaved=True),
        intermediate_size=fields.integer("intermediate_size_mlp"),
        nope_layers=frozenset(layer for layer in layers if not has_rope[layer]),
        attn_temperature=temperature if fields.values.get("attn_temperature_tuning", True) else None,
        qk_l2_norm=fields.boolean("use_qk_norm", default=True),
        attention_chunks=tuple(chunk if kind == "chunked_attention" else 0 for kind in kinds),
        moe=_moe(fields, config.intermediate_size),
        moe_layers=_moe_layers(fields, config.num_hidden_layers),
    )


def _moe(fields: Fields, intermediate_size: int) -> MoEConfig:
    try:
        return MoEConfig(
            num_experts=fields.integer("num_local_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok", default=1),
            intermediate_size=intermediate_size,
            norm_topk_prob=False,
            routing="sigmoid",
            weight_on_input=True,
            shared_intermediate_size=intermediate_size,
        )
    except ValueError as error:
        raise ValueError(f"{fields.where}: {error}") from None


def _moe_layers(fields: Fields, num_hidden_layers: int) -> frozenset[int]:
    if fields.values.get("moe_layers") is not None:
        return frozenset(fields.integers("moe_layers"))
    step = fields.integer("interleave_moe_layer_step", default=1)
    return frozenset(range(step - 1, num_hidden_layers, step))
