"""Attention one request at a time: gather K and V by slot, mask, softmax, weighted sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from diptych.shared.interfaces import attention as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer


class RequestPlan(NamedTuple):
    rows: slice  # of q: the request's tokens
    slots: torch.Tensor  # int64 [num_keys], by position
    visible: torch.Tensor  # bool [num_queries, num_keys], before a layer's window
    key_positions: torch.Tensor | None = None  # the same shape, along each query's branch; None: 0, 1, 2 ...


# --8<-- [start:virtual-requests]
def virtual_requests(request: RequestPlan, chunk: int) -> list[RequestPlan]:
    """Chunked local attention: the queries of each chunk, as a request of its own."""
    num_queries, num_keys = request.visible.shape
    first = num_keys - num_queries  # position of the first query
    found = []
    for start in range(first // chunk * chunk, num_keys, chunk):
        end = min(start + chunk, num_keys)
        queries = slice(max(start - first, 0), end - first)
        rows = slice(request.rows.start + queries.start, request.rows.start + queries.stop)
        found.append(RequestPlan(rows, request.slots[start:end], request.visible[queries, start:end]))
    return found
    # --8<-- [end:virtual-requests]


def in_chunks(request: RequestPlan, chunk: int) -> list[RequestPlan]:
    """The request, or parts of it, such that each query sees the keys of its chunk alone. Nodes of a tree
    that are in one chunk need not have consecutive rows: there the mask says it."""
    if request.key_positions is None:
        return virtual_requests(request, chunk)
    first = request.key_positions[:, -1:] // chunk * chunk
    return [request._replace(visible=request.visible & (request.key_positions >= first))]


def in_window(request: RequestPlan, window: int) -> torch.Tensor:
    """`request.visible` without the keys before each query's window."""
    if request.key_positions is not None:
        return request.visible & (request.key_positions >= request.key_positions[:, -1:] - window)
    num_queries, num_keys = request.visible.shape
    return request.visible.triu(num_keys - num_queries - window)


def with_masks(plans: list[RequestPlan], forward_batch: ForwardBatch) -> list[RequestPlan]:
    """The plans with the batch's own masks in place of causal ones."""
    masked, start = [], 0
    for i, plan in enumerate(plans):
        num_queries, num_keys = plan.visible.shape
        if forward_batch.custom_mask is not None:
            end = start + num_queries * num_keys
            visible = forward_batch.custom_mask[start:end].view(num_queries, num_keys)
            start = end
        else:
            # --8<-- [start:along-the-branch]
            # of the last keys; all earlier ones are visible
            assert forward_batch.tree_mask is not None
            tree_mask = forward_batch.tree_mask[i]
            visible = F.pad(tree_mask, (num_keys - tree_mask.shape[1], 0), value=True)
            plan = plan._replace(key_positions=visible.cumsum(dim=1) - 1)
            # --8<-- [end:along-the-branch]
        masked.append(plan._replace(visible=visible))
    return masked


class TorchAttention(interface.AttentionBackend):
    """Supports every layer and every batch of the contract. Holds the scores of one request at a time,
    float32 [num_qo_heads, num_queries, num_keys]."""

    accepts_seq_len_upper_bounds = True

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool

    # --8<-- [start:attention-plan]
    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        plans: list[RequestPlan] = []
        table = self.req_to_token_pool.req_to_token
        row = 0
        for i, num_keys in enumerate(forward_batch.seq_lens.tolist()):
            num_queries = forward_batch.extend_seq_lens_cpu[i]
            slots = table[forward_batch.req_pool_indices[i], :num_keys].long()
            visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=slots.device)
            # query r is at position num_keys - num_queries + r
            visible = visible.tril(num_keys - num_queries)
            plans.append(RequestPlan(slice(row, row + num_queries), slots, visible))
            row += num_queries
        is_causal = forward_batch.custom_mask is None and forward_batch.tree_mask is None
        return plans if is_causal else with_masks(plans, forward_batch)

    # --8<-- [end:attention-plan]

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
        if layer.attention_chunk > 0:
            plan = [local for request in plan for local in in_chunks(request, layer.attention_chunk)]
        for request in plan:
            output[request.rows] = self._run_request(q[request.rows], layer, request)
        return output

    # --8<-- [start:gather-and-score]
    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.to(dtype) for x in self._keys_and_values(layer, request.slots))
        # Each KV head serves a group of query heads.
        group_size = layer.num_qo_heads // layer.num_kv_heads
        k, v = (x.transpose(0, 1).repeat_interleave(group_size, dim=0) for x in (k, v))
        # [heads, queries, keys]
        scores = (q.to(dtype) * layer.scale).transpose(0, 1) @ k.transpose(1, 2)
        if layer.logit_cap > 0:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        visible = request.visible
        if layer.sliding_window >= 0:
            visible = in_window(request, layer.sliding_window)
        scores = scores.masked_fill(~visible, float("-inf"))
        if layer.sinks is not None:  # one more column, without a value
            sinks = layer.sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        # The softmax of a query without a visible key is NaN: its weights become zeros.
        weights = torch.softmax(scores, dim=-1)[..., : len(request.slots)]
        weights = weights.masked_fill(~visible, 0.0)
        return (weights @ v).transpose(0, 1)

    # --8<-- [end:gather-and-score]

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
