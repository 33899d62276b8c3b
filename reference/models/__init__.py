"""The model families, by the name that a config.json has under "architectures"."""

from __future__ import annotations

from importlib import import_module

from shared.interfaces.model import CausalLM

MODELS = {
    "LlamaForCausalLM": "reference.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "reference.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "reference.models.mixtral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "reference.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "reference.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "reference.models.qwen3_moe:Qwen3MoeForCausalLM",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture; an unknown one raises `ValueError` listing the known."""
    if architecture not in MODELS:
        raise ValueError(f"no model for architecture {architecture!r}; there are {', '.join(MODELS)}")
    module, name = MODELS[architecture].split(":")
    return getattr(import_module(module), name)
