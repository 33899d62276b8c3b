"""Qwen2 and Qwen2.5: the Llama decoder with a bias on q, k and v, none on the output (`config.qkv_bias`).

Differs from reference: only in the decoder (llama.py), where the three biases are one.
"""

from optimized.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """With `use_sliding_window`, layers from `max_window_layers` on have a sliding window."""
