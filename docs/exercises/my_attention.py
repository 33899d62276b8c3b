"""Stage 07, attention: complete the functions that raise NotImplementedError.

diptych course grade 07     # in the folder of `diptych course start`
diptych check --stage 07 my_attention.py

The contract is in shared/interfaces/attention.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.reference.attention import in_chunks
from diptych.shared.interfaces import attention as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer


class RequestPlan(NamedTuple):
    rows: slice  # of q: the request's tokens
    slots: torch.Tensor  # int64 [num_keys], by position
    visible: torch.Tensor  # bool [num_queries, num_keys], before a layer's window
    key_positions: torch.Tensor | None = None  # of a tree_mask: the same shape, along each query's branch


class MyAttention(interface.AttentionBackend):
    """Supports every layer and every batch of the contract. Holds the scores of one request at a time,
    float32 [num_qo_heads, num_queries, num_keys]."""

    accepts_seq_len_upper_bounds = True

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        """Once per step: everything that does not depend on the layer."""
        raise NotImplementedError("TODO decode: what does each request read?")

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: list[RequestPlan],
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = attention_output(q, layer, out)
        if layer.attention_chunk > 0:  # the queries of each chunk, as a request of their own
            plan = [local for request in plan for local in in_chunks(request, layer.attention_chunk)]
        for request in plan:
            output[request.rows] = self._run_request(q[request.rows], layer, request)
        return output

    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        """q [num_queries, num_qo_heads, head_dim] -> the same shape."""
        raise NotImplementedError("TODO decode: the formula, for the heads of one request")

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_keys, num_kv_heads, head_dim] each; from an FP8 pool widened, times the layer's scales."""
        pool = self.kv_pool
        k, v = pool.k_buffer(layer.layer_id)[slots], pool.v_buffer(layer.layer_id)[slots]
        if pool.dtype not in FP8_TYPES:
            return k, v
        scales = pool.kv_scales[layer.layer_id]
        return k.to(torch.float32) * scales.k, v.to(torch.float32) * scales.v
