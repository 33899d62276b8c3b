"""Mixtral: the Llama decoder with an MoE for the MLP of every layer (`config.moe_layers`)."""

from reference.models.llama import LlamaForCausalLM


class MixtralForCausalLM(LlamaForCausalLM):
    """Softmax over all experts, the best two, their weights renormalised (`config.moe.norm_topk_prob`)."""
