"""The parts of a config.json that DeepSeek's families add: multi-head latent attention, and their experts."""

from __future__ import annotations

from typing import Literal

from diptych.shared.config.fields import Fields
from diptych.shared.config.model import MLAConfig, MoEConfig

DeepseekMoE = Literal["deepseek-v2", "deepseek-v3"]

ROUTING: dict[DeepseekMoE, dict[str, Literal["softmax", "grouped", "biased-grouped"]]] = {
    "deepseek-v2": {"greedy": "softmax", "group_limited_greedy": "grouped"},
    "deepseek-v3": {"noaux_tc": "biased-grouped"},
}
"""topk_method -> our name. The first is what a family has where the key is missing: transformers 5 writes
none."""
SCORING = {"deepseek-v2": "softmax", "deepseek-v3": "sigmoid"}


def parse_mla(fields: Fields) -> MLAConfig:
    return MLAConfig(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        q_lora_rank=fields.integer("q_lora_rank", default=None),
    )


def parse_deepseek_moe(fields: Fields, kind: DeepseekMoE) -> MoEConfig:
    routings = ROUTING[kind]
    method = fields.raw("topk_method", "a name", default=next(iter(routings)))
    if method not in tuple(routings):
        raise ValueError(
            f"{fields.where}: topk_method is {method!r:.80}; supported for this family: {', '.join(routings)}"
        )
    scoring = fields.raw("scoring_func", "a name", default=SCORING[kind])
    if scoring != SCORING[kind]:
        raise ValueError(
            f"{fields.where}: scoring_func is {scoring!r:.80}; supported for this family is {SCORING[kind]}"
        )
    norm_topk_prob = fields.boolean("norm_topk_prob", default=kind == "deepseek-v3")
    if norm_topk_prob and kind == "deepseek-v2":
        # Engines disagree on whether the scaling factor applies then; no published checkpoint has it.
        raise ValueError(f"{fields.where}: norm_topk_prob is true; supported for this family is false")
    is_grouped = routings[method] != "softmax"
    intermediate_size = fields.integer("moe_intermediate_size")
    try:
        return MoEConfig(
            num_experts=fields.integer(key_of_num_experts(fields)),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            intermediate_size=intermediate_size,
            norm_topk_prob=norm_topk_prob,
            routing=routings[method],
            num_expert_groups=fields.integer("n_group") if is_grouped else 1,
            topk_group=fields.integer("topk_group") if is_grouped else 1,
            routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
            shared_intermediate_size=intermediate_size * fields.integer("n_shared_experts", 0, minimum=0),
        )
    except ValueError as error:
        message = str(error)
        where = "" if message.startswith(fields.where) else f"{fields.where}: "
        raise ValueError(where + message) from None


def key_of_num_experts(fields: Fields) -> str:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((name for name in names if name in fields), names[0])


def deepseek_moe_layers(fields: Fields, num_hidden_layers: int) -> frozenset[int]:
    """The first layers are dense."""
    first = fields.integer("first_k_dense_replace", default=0, minimum=0)
    step = fields.integer("moe_layer_freq", default=1)
    return frozenset(i for i in range(first, num_hidden_layers) if i % step == 0)


def num_nextn_layers(fields: Fields) -> int:
    """Layers for drafting that a checkpoint may have. Configs count them also where there are none."""
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    key = next((key for key in keys if key in fields), keys[0])
    number: int = fields.integer(key, default=0, minimum=0)
    return number
