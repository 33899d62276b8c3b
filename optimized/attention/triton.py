"""Attention by three Triton kernels: for decoding, for drafts, and for everything else.

Differs from reference: the kernels read K and V from the pool's slots, and scores never reach memory. A plan
holds only the batch's tensors: grids follow from shapes, and the device divides the work among CTAs. So a
plan stays valid for a CUDA graph. Prefill is slower than FlashAttention 3 on Hopper GPUs. Drafts with a flat
mask (`custom_mask`), of requests of unequal width, or in layers with a window run as prefill: few of them do
not fill the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from diptych.optimized.kernels.attention.decode_attention import _decode_kernel, decode_attention
from diptych.optimized.kernels.attention.extend_attention import extend_attention
from diptych.optimized.kernels.attention.fp8_decode_attention import fp8_decode_attention, suits_fp8_kernel
from diptych.optimized.kernels.attention.paged_softmax import window_of
from diptych.optimized.kernels.attention.tree_attention import tree_attention
from diptych.shared.interfaces import attention as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
POOL_DTYPES = (*DTYPES, *FP8_TYPES)


@dataclass(frozen=True, eq=False)
class TritonPlan:
    forward_batch: ForwardBatch
    counters: torch.Tensor  # int32, zeros between launches: see decode_attention
    num_keys: int = 0  # of the longest prompt; 0 in a CUDA graph

    @property
    def is_tree(self) -> bool:
        """Drafts in a fixed shape: equally many of each request, and no flat mask."""
        batch = self.forward_batch
        is_verify = batch.forward_mode is ForwardMode.TARGET_VERIFY and batch.custom_mask is None
        return is_verify and len(set(batch.extend_seq_lens_cpu)) == 1


class TritonAttention(interface.AttentionBackend):
    """Supports every layer and every batch of the contract in float16, bfloat16 and float32, up to
    `max_head_dim`, and pools of these types and FP8. K and V are widened to q's type behind their loads, so
    FP8 halves the bytes that are read. Their scales multiply scores and output."""

    max_head_dim = 512
    supports_cuda_graph = True
    accepts_seq_len_upper_bounds = True
    supports_ragged_graphs = True

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        if kv_pool.dtype not in POOL_DTYPES:
            raise ValueError(
                f"dtype {kv_pool.dtype} is not supported: TritonAttention supports {POOL_DTYPES}"
            )
        if kv_pool.device.type != "cuda" and isinstance(_decode_kernel, JITFunction):
            raise ValueError(
                f"device {kv_pool.device.type} is not supported: TritonAttention supports cuda, and others "
                "in Triton's interpreter (TRITON_INTERPRET=1)"
            )
        self.num_kv_heads, head_dim = kv_pool.largest_heads
        if head_dim > self.max_head_dim:
            supported = f"{type(self).__name__} supports 1 to {self.max_head_dim}"
            raise ValueError(f"head_dim {head_dim} is not supported: {supported}")
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool
        self.counters = self._new_counters(req_to_token_pool.req_to_token.shape[0])

    def plan(self, forward_batch: ForwardBatch) -> TritonPlan:
        if forward_batch.batch_size * self.num_kv_heads > self.counters.numel():
            self.counters = self._new_counters(forward_batch.batch_size)
        is_prompt = forward_batch.forward_mode.is_prefill
        return TritonPlan(
            forward_batch, self.counters, max(forward_batch.seq_lens_cpu, default=0) if is_prompt else 0
        )

    def plan_for_graph(self, forward_batch: ForwardBatch, max_seq_len: int) -> TritonPlan:
        return replace(self.plan(forward_batch), num_keys=0)

    def replan(self, plan: TritonPlan, forward_batch: ForwardBatch) -> None:
        """Nothing: the kernels read the batch's buffers."""

    def plan_ragged(self, forward_batch: ForwardBatch) -> TritonPlan:
        return self.plan_for_graph(forward_batch, 0)

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
        if q.dtype not in DTYPES:
            raise ValueError(f"dtype {q.dtype} is not supported: TritonAttention supports {DTYPES}")
        batch = plan.forward_batch
        k_buffer, v_buffer = self.kv_pool.k_buffer(layer.layer_id), self.kv_pool.v_buffer(layer.layer_id)
        where = (self.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens)
        kv_scales = self.kv_pool.kv_scales[layer.layer_id]
        options: dict[str, Any] = {
            "scale": layer.scale * kv_scales.k,
            "v_scale": kv_scales.v,
            "page_size": self.kv_pool.page_size,
            "sliding_window": window_of(layer),
            "logit_cap": layer.logit_cap,
            "sinks": layer.sinks,
            "out": attention_output(q, layer, out),
        }
        if batch.forward_mode.is_decode and batch.custom_mask is None:
            decode = fp8_decode_attention if suits_fp8_kernel(q, k_buffer) else decode_attention
            return decode(q, k_buffer, v_buffer, *where, plan.counters, **options)
        if plan.is_tree and (batch.tree_mask is not None or window_of(layer) == -1):
            return tree_attention(q, k_buffer, v_buffer, *where, **options, tree_mask=batch.tree_mask)
        options["custom_mask"] = batch.custom_mask
        new_tokens = (batch.extend_seq_lens, batch.extend_start_loc)
        return extend_attention(q, k_buffer, v_buffer, *where, *new_tokens, **options, num_keys=plan.num_keys)

    def _new_counters(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size * self.num_kv_heads, dtype=torch.int32, device=self.kv_pool.device)
