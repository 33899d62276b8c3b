"""Small model configs of awkward shapes, as Hugging Face config dicts: every family, every RoPE scaling, both
dialects of config.json. With
`diptych.shared.loading.weights.dummy_weights` each is a model that runs in milliseconds.

Head counts that are no power of two, a head_dim that is not hidden_size / heads, a vocabulary that is no
multiple of 64, windows and trained lengths that a prompt of 80 tokens exceeds.
"""

from __future__ import annotations

from typing import Any

from diptych.shared.tools.conformance.oracles.moe_configs import COMMON, MOE_CONFIGS, shape

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **COMMON}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **COMMON}
_GEMMA = {key: value for key, value in COMMON.items() if key != "hidden_act"}
"""Without hidden_act: Gemma's key is hidden_activation, and its only value the default."""


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-biases": {
        **_LLAMA,
        **shape(96, 130, 2, 6, 2),
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
        **shape(100, 72, 3, 5, 1),
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
        **shape(64, 88, 2, 4, 4),
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "llama-dynamic": {
        **_LLAMA,
        **shape(64, 88, 2, 4, 2),
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "dtype": "float32",
        "tie_word_embeddings": False,
    },
    "llama-yarn": {
        **_LLAMA,
        **shape(96, 88, 2, 3, 1),
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
        **COMMON,
        **shape(84, 120, 3, 7, 1),
        "head_dim": 12,
        "sliding_window": 24,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **COMMON,
        **shape(72, 104, 3, 6, 2),
        "partial_rotary_factor": 0.5,
        "sliding_window": 30,
        "rope_theta": 10000.0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    },
    "qwen2-window-layers": {
        **_QWEN2,
        **shape(72, 104, 3, 6, 2),
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
    "qwen2-yarn": {
        **_QWEN2,
        **shape(64, 96, 2, 4, 1),
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
        **shape(60, 96, 3, 6, 3),
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
        **shape(64, 96, 2, 4, 2),
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
    "gemma2": {
        **_GEMMA,
        **shape(72, 104, 4, 6, 2),
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 24,
        "query_pre_attn_scalar": 40,
        "sliding_window": 21,
        "rope_theta": 10000.0,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 12.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    "gemma3": {
        **_GEMMA,
        **shape(64, 88, 3, 4, 1),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 20,
        "query_pre_attn_scalar": 30,
        "sliding_window": 17,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "torch_dtype": "float32",
    },
    "gemma3-layer-types": {
        **_GEMMA,
        **shape(60, 96, 3, 6, 3),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
        "final_logit_softcapping": 12.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    **MOE_CONFIGS,
}
