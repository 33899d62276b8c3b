"""Qwen2 and Qwen2.5: the Llama decoder with a bias on q, k and v, none on the output (`config.qkv_bias`)."""

from reference.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """With `use_sliding_window`, layers from `max_window_layers` on have a sliding window."""
