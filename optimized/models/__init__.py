"""The models by architecture. Nearly all families are one decoder, decoder.py: what a family adds is a row of
`diptych.shared.config.families` and fields of ModelConfig. A family whose forward pass differs has its own
file.

Differs from reference: the classes.
"""

from __future__ import annotations

from diptych.shared.config.families import find_class
from diptych.shared.interfaces.model import CausalLM

CLASSES = {
    "decoder": "diptych.optimized.decoder:DecoderForCausalLM",
    "gemma": "diptych.optimized.models.gemma:GemmaForCausalLM",
    "gemma4": "diptych.optimized.models.gemma4_model:Gemma4ForCausalLM",
    "glm4": "diptych.optimized.models.gemma:Glm4ForCausalLM",
    "granite": "diptych.optimized.models.granite:GraniteForCausalLM",
    "kimi_linear": "diptych.optimized.models.kimi_linear:KimiLinearForCausalLM",
    "llama4": "diptych.optimized.models.llama4:Llama4ForCausalLM",
    "minimax": "diptych.optimized.models.olmo:MiniMaxForCausalLM",
    "olmo": "diptych.optimized.models.olmo:OlmoForCausalLM",
    "qwen_next": "diptych.optimized.models.qwen_next:QwenNextForCausalLM",
}

LAYERS = "optimized"
"""The choice of layers that these models fuse. With other layers they run too, one kernel after the other."""


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture; an unknown one raises `ValueError` listing the known ones."""
    found: type[CausalLM] = find_class(architecture, CLASSES)
    return found
