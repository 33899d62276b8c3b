"""Qwen3-MoE: Qwen3 with an MoE for the MLP of most layers, many small experts (`config.moe_layers`)."""

from reference.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """`decoder_sparse_step` and `mlp_only_layers` leave some layers dense."""
