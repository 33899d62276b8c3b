"""The text model in the config.json of a multimodal one: of such a checkpoint only that part runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.shared.config.fields import Fields, only_name

TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # text_config of published checkpoints lacks what is the default of transformers' class
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "Gemma4ForConditionalGeneration": (
        "Gemma4ForCausalLM",
        {
            "vocab_size": 262_144,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", {}),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 22_016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500_000.0,
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeForCausalLM",
        {"norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0},
    ),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", {}),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", {}),
    "LlavaForConditionalGeneration": (
        "LlamaForCausalLM",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
    ),
}
"""The architecture -> that of its text model, and defaults of its text_config."""
SHARED = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
"""Keys that may be outside text_config."""


LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.")
"""What multimodal checkpoints put in the place of `model.`"""


def language_name(name: str) -> str:
    """The name of a language model's layer or weight without the prefixes of a multimodal checkpoint."""
    for prefix in LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def text_part(hf_config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """The config of the text model of one of TEXT_MODELS, and what to call it in errors."""
    architecture, defaults = TEXT_MODELS[only_name(hf_config["architectures"])]
    text_config = Fields(hf_config, where).raw("text_config", "an object")
    where = f"{where}, text_config"
    model_type = Fields(text_config, where).values.get("model_type", "llama")
    if architecture == "LlamaForCausalLM" and model_type != "llama":
        raise ValueError(f"{where}: model_type is {model_type!r:.80}; the text model of a LLaVA is 'llama'")
    shared = {key: hf_config[key] for key in SHARED if hf_config.get(key) is not None}
    items = Fields(text_config, where).values.items()
    own = {key: value for key, value in items if value is not None or key not in shared}
    return {**defaults, **shared, **own, "architectures": [architecture]}, where
