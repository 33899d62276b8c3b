"""Mistral: the Llama decoder with a sliding window in every layer (`config.sliding_windows`).

Differs from reference: only in the decoder (llama.py). The window is the attention backend's to honour.
"""

from optimized.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """A token of layer l sees `window` tokens back, through l layers l * window; later releases see all."""
