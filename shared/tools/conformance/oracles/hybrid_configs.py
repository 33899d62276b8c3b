"""Small configs of models with linear attention, as in `configs`. Unequal sizes of k and v heads, three value
heads a key head, more layers than the pattern of kinds is long."""

from __future__ import annotations

from typing import Any

from diptych.shared.tools.conformance.oracles.moe_configs import COMMON, shape

_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
}
_ROPE = {
    "rope_type": "default",
    "rope_theta": 1000000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}

HYBRID_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **COMMON,
        **shape(60, 88, 5, 4, 2),
        **_LINEAR,
        **_MOE,
        "head_dim": 24,
        "layer_types": [
            *("linear_attention", "full_attention", "linear_attention", "linear_attention"),
            "full_attention",
        ],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **COMMON,
        **shape(60, 88, 4, 4, 2),
        **_LINEAR,
        "head_dim": 32,
        "rope_parameters": _ROPE,
        "dtype": "float32",
        "tie_word_embeddings": True,
    },
    "qwen3.5-moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **COMMON,
        **shape(60, 88, 4, 4, 2),
        **_LINEAR,
        **_MOE,
        "head_dim": 32,
        "rope_parameters": _ROPE,
        "dtype": "float32",
        "tie_word_embeddings": False,
    },
    "kimi-linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **{key: value for key, value in COMMON.items() if key != "max_position_embeddings"},
        "model_max_length": COMMON["max_position_embeddings"],
        **shape(60, 88, 5, 4, 4),
        "kv_lora_rank": 20,
        "q_lora_rank": None,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 15,
        "linear_attn_config": {
            "kda_layers": [1, 3, 4],
            "full_attn_layers": [2, 5],
            "num_heads": 3,
            "head_dim": 20,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 28,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "pad_token_id": 0,
        "dtype": "float32",
        "tie_word_embeddings": False,
    },
}
