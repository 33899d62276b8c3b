"""Qwen3: the Llama decoder with an RMSNorm on each head of q and k before the rotation (`config.qk_norm`).

Differs from reference: only in the decoder (llama.py), where norms and rotation are one kernel.
"""

from optimized.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The norm keeps the scores q·k bounded, which the biases of Qwen2 were for; `head_dim` is 128 whatever
    hidden_size / num_attention_heads is."""
