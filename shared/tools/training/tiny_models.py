"""The shapes of the built-in models."""

from typing import Any

from transformers import PretrainedConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from diptych.shared.tools.training.learn_tokenizer import VOCAB_SIZE

# The embedding has more rows than the tokenizer has tokens, as in most published checkpoints.
PADDED_VOCAB_SIZE = -(-VOCAB_SIZE // 64) * 64
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = VOCAB_SIZE - 3, VOCAB_SIZE - 2, VOCAB_SIZE - 1

_SHARED_SHAPE: dict[str, Any] = {
    "vocab_size": PADDED_VOCAB_SIZE,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": IM_END_ID,
    "pad_token_id": END_OF_TEXT_ID,
}


# Optimizer steps of the published weights.
NUM_STEPS = {"dense": 14_000, "moe": 10_500, "hybrid": 3_221}


def dense_config(**overrides: Any) -> Qwen3Config:
    """About 3.7 M parameters."""
    return Qwen3Config(**(_SHARED_SHAPE | {"hidden_size": 256, "intermediate_size": 448} | overrides))


def moe_config(**overrides: Any) -> Qwen3MoeConfig:
    """About 3.9 M parameters, of which a token uses 1.9 M. The heads' width (256) is not the hidden size."""
    shape = {
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
    }
    return Qwen3MoeConfig(**(_SHARED_SHAPE | shape | overrides))


def hybrid_config(**overrides: Any) -> Qwen3_5TextConfig:
    """About 0.5 M parameters: six layers of linear attention and two of attention, in the order of Qwen3.5.

    1.1 MB in bfloat16. FP8 formats leave the embedding as it is, a quarter of these bytes.
    """
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        # A quarter of a head's 32 numbers turns, in three sections of angles for images, which texts share.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return Qwen3_5TextConfig(**(_SHARED_SHAPE | shape | overrides))


def model_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The config called `name`: dense, moe or hybrid."""
    configs = {"dense": dense_config, "moe": moe_config, "hybrid": hybrid_config}
    if name not in configs:
        raise ValueError(f"no built-in model is called {name!r}; there are: {', '.join(configs)}")
    return configs[name](**overrides)
