"""Attention of deterministic mode: keys are summed in the order of positions, in splits at fixed positions.

Differs from reference: it computes all tokens of a batch together, and a row's bits still depend on its own
keys alone. Slower than the default backend: one size of tile for prefill and decode. Batches with a mask,
which only drafting has in this mode, run as in TritonAttention.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.attention.triton import TritonAttention, TritonPlan
from diptych.optimized.kernels.attention.fixed_split_attention import fixed_split_attention
from diptych.optimized.kernels.attention.paged_softmax import window_of
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types.attention import AttentionLayer


class DeterministicAttention(TritonAttention):
    """Supports every layer and batch that TritonAttention supports. Without a mask, a row of the output
    depends on its query and its keys, not on the batch, the split of its request into steps, or CUDA
    graphs."""

    is_deterministic = True
    max_head_dim = 256

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: TritonPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = plan.forward_batch
        if batch.custom_mask is not None or batch.tree_mask is not None:
            return super().run(q, layer, plan, k=k, v=v, out=out)
        kv_scales = self.kv_pool.kv_scales[layer.layer_id]
        options: dict[str, Any] = {
            "scale": layer.scale * kv_scales.k,
            "v_scale": kv_scales.v,
            "page_size": self.kv_pool.page_size,
            "sliding_window": window_of(layer),
            "logit_cap": layer.logit_cap,
            "sinks": layer.sinks,
        }
        return fixed_split_attention(
            q,
            self.kv_pool.k_buffer(layer.layer_id),
            self.kv_pool.v_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.extend_seq_lens,
            batch.extend_start_loc,
            out=attention_output(q, layer, out),
            is_decode=batch.forward_mode.is_decode,
            **options,
        )
