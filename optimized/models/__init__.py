"""The model families, by the name that a config.json has under "architectures"."""

from __future__ import annotations

from importlib import import_module

from shared.interfaces.model import CausalLM

MODELS = {
    "LlamaForCausalLM": "optimized.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "optimized.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "optimized.models.mixtral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "optimized.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "optimized.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "optimized.models.qwen3_moe:Qwen3MoeForCausalLM",
}

LAYERS = "optimized"
"""The choice of layers that these models fuse. With other layers they run too, one kernel after the other."""


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture; an unknown one raises `ValueError` listing the known."""
    if architecture not in MODELS:
        raise ValueError(f"no model for architecture {architecture!r}; there are {', '.join(MODELS)}")
    module, name = MODELS[architecture].split(":")
    return getattr(import_module(module), name)
