"""Qwen3-MoE: Qwen3 with an MoE for the MLP of most layers, many small experts (`config.moe_layers`).

Differs from reference: only in the decoder (llama.py) and in the experts (moe.py).
"""

from optimized.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """`decoder_sparse_step` and `mlp_only_layers` leave some layers dense."""
