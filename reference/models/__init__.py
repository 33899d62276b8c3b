"""The model families: "architectures" of a config.json -> model class.

Nearly all families are one decoder, llama.py. What a family adds is a field of ModelConfig, which
`diptych.shared.config.hf_config` reads; the comments name it. A family whose forward pass differs has its
own file.
"""

from __future__ import annotations

from importlib import import_module

from diptych.shared.interfaces.model import CausalLM

MODELS = {
    # no biases (attention_bias and mlp_bias in config.json), scaled RoPE
    "LlamaForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # a sliding window in every layer, in early releases
    "MistralForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # four norms a layer, 1 + weight in each; soft-caps; a window in every other layer
    "Gemma2ForCausalLM": "diptych.reference.models.gemma:GemmaForCausalLM",
    # norms on heads instead of the caps; windows in five layers of six, and a RoPE of their own
    "Gemma3ForCausalLM": "diptych.reference.models.gemma:GemmaForCausalLM",
    # sinks in attention; experts with biases and a clamped SwiGLU; a window in every other layer
    "GptOssForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # chunked attention with RoPE, full attention without; one expert of many, and a shared one
    "Llama4ForCausalLM": "diptych.reference.models.llama4:Llama4ForCausalLM",
    # MoE in every layer: softmax over all experts, the best two renormalised
    "MixtralForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # biases on q, k and v; windows from layer max_window_layers on
    "Qwen2ForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # RMSNorm on each head of q and k; head_dim is set apart from hidden_size
    "Qwen3ForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # Qwen3 with MoE in the layers of decoder_sparse_step and mlp_only_layers
    "Qwen3MoeForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # multi-head latent attention; dense first layers, then MoE with shared experts and groups of experts
    "DeepseekV2ForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
    # the same, routed by a sigmoid and a bias for each expert
    "DeepseekV3ForCausalLM": "diptych.reference.decoder:DecoderForCausalLM",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture; an unknown one raises `ValueError` listing the known ones."""
    if architecture not in MODELS:
        raise ValueError(f"no model for architecture {architecture!r}; supported are {', '.join(MODELS)}")
    module, name = MODELS[architecture].split(":")
    return getattr(import_module(module), name)
