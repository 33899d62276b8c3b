"""The models by architecture. Nearly all families are one decoder, decoder.py: what a family adds is a row of
`diptych.shared.config.families` and fields of ModelConfig. A family whose forward pass differs has its own
file.
"""

from __future__ import annotations

from diptych.shared.config.families import find_class
from diptych.shared.interfaces.model import CausalLM

CLASSES = {
    "decoder": "diptych.reference.decoder:DecoderForCausalLM",
    "gemma": "diptych.reference.models.gemma:GemmaForCausalLM",
    "gemma4": "diptych.reference.models.gemma4_model:Gemma4ForCausalLM",
    "glm4": "diptych.reference.models.gemma:Glm4ForCausalLM",
    "granite": "diptych.reference.models.granite:GraniteForCausalLM",
    "minimax": "diptych.reference.models.olmo:MiniMaxForCausalLM",
    "olmo": "diptych.reference.models.olmo:OlmoForCausalLM",
    "kimi_linear": "diptych.reference.models.kimi_linear:KimiLinearForCausalLM",
    "llama4": "diptych.reference.models.llama4:Llama4ForCausalLM",
    "qwen_next": "diptych.reference.models.qwen_next:QwenNextForCausalLM",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture; an unknown one raises `ValueError` listing the known ones."""
    found: type[CausalLM] = find_class(architecture, CLASSES)
    return found
