"""Mixtral: the Llama decoder with an MoE for the MLP of every layer (`config.moe_layers`).

Differs from reference: only in the decoder (llama.py) and in the experts (moe.py).
"""

from optimized.models.llama import LlamaForCausalLM


class MixtralForCausalLM(LlamaForCausalLM):
    """Softmax over all experts, the best two, their weights renormalised (`config.moe.norm_topk_prob`)."""
