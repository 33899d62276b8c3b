"""Small model configs of awkward shapes, as Hugging Face config dicts: every family, every RoPE scaling, both
dialects of config.json. With
`shared.loading.weights.dummy_weights` each is a model that runs in milliseconds.

Head counts that are no power of two, a head_dim that is not hidden_size / heads, a vocabulary that is no
multiple of 64, windows and trained lengths that a prompt of 80 tokens exceeds.
"""

from __future__ import annotations

from typing import Any

_COMMON = {
    "vocab_size": 331,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_COMMON}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_COMMON}
_QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_COMMON}


def _shape(hidden: int, intermediate: int, layers: int, qo_heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": qo_heads,
        "num_key_value_heads": kv_heads,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-biases": {
        **_LLAMA,
        **_shape(96, 130, 2, 6, 2),
        "head_dim": 80,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "llama-llama3": {
        **_LLAMA,
        **_shape(100, 72, 3, 5, 1),
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
    "llama-linear": {
        **_LLAMA,
        **_shape(64, 88, 2, 4, 4),
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "llama-dynamic": {
        **_LLAMA,
        **_shape(64, 88, 2, 4, 2),
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "dtype": "float32",
        "tie_word_embeddings": False,
    },
    "llama-yarn": {
        **_LLAMA,
        **_shape(96, 88, 2, 3, 1),
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        "dtype": "float32",
        "tie_word_embeddings": False,
    },
    "mistral-window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **_COMMON,
        **_shape(84, 120, 3, 7, 1),
        "head_dim": 12,
        "sliding_window": 24,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "qwen2-window-layers": {
        **_QWEN2,
        **_shape(72, 104, 3, 6, 2),
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
    "qwen2-yarn": {
        **_QWEN2,
        **_shape(64, 96, 2, 4, 1),
        "use_sliding_window": False,
        "sliding_window": 17,
        "max_window_layers": 1,
        "max_position_embeddings": 64,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "qwen3-layer-types": {
        **_QWEN3,
        **_shape(60, 96, 3, 6, 3),
        "head_dim": 80,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "dtype": "float32",
        "tie_word_embeddings": True,
    },
    "qwen3-yarn": {
        **_QWEN3,
        **_shape(64, 96, 2, 4, 2),
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.25,
        },
        "dtype": "float32",
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **_COMMON,
        **_shape(64, 56, 2, 4, 2),
        "head_dim": None,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "rope_theta": 1000000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "qwen3-moe": {
        **_QWEN3_MOE,
        **_shape(64, 88, 4, 4, 1),
        "head_dim": 24,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "rope_theta": 1000000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "qwen3-moe-renormalised": {
        **_QWEN3_MOE,
        **_shape(64, 88, 2, 6, 2),
        "head_dim": 16,
        "attention_bias": True,
        "num_local_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 30,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        "dtype": "float32",
        "tie_word_embeddings": True,
    },
}
