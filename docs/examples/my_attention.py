"""A simple attention backend that never holds all scores of a request. Check it:

diptych check attention docs/examples/my_attention.py:MyAttention

Keys are taken in blocks, with a running maximum and a running sum, as FlashAttention does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.shared.interfaces import AttentionBackend, ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer

KEYS_PER_BLOCK = 64


class Request(NamedTuple):
    rows: slice  # of q
    positions: torch.Tensor  # int64 [num_queries]
    slots: torch.Tensor  # int64 [num_keys], by position


class MyAttention(AttentionBackend):
    """Supports causal layers with any scale and soft-cap."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        if kv_pool.dtype in FP8_TYPES:
            raise ValueError("kv_cache_dtype: MyAttention supports auto, and no FP8")
        self.req_to_token = req_to_token_pool.req_to_token
        self.kv_pool = kv_pool

    def check_layer(self, layer: AttentionLayer) -> None:
        """Called for each layer when an engine starts."""
        if layer.sliding_window >= 0 or layer.attention_chunk > 0 or layer.sinks is not None:
            raise ValueError("sliding_window, attention_chunk, sinks: MyAttention supports none of them")

    # --8<-- [start:plan-and-run]
    def plan(self, forward_batch: ForwardBatch) -> list[Request]:
        """Once per step: everything that does not depend on the layer."""
        if forward_batch.custom_mask is not None or forward_batch.tree_mask is not None:
            raise ValueError("custom_mask, tree_mask: MyAttention supports causal batches only")
        requests, start = [], 0
        for i, row in enumerate(forward_batch.req_pool_indices.tolist()):
            rows = slice(start, start := start + forward_batch.extend_seq_lens_cpu[i])
            slots = self.req_to_token[row, : forward_batch.seq_lens_cpu[i]].long()
            requests.append(Request(rows, forward_batch.positions[rows], slots))
        return requests

    def run(self, q, layer: AttentionLayer, plan: list[Request], *, k=None, v=None, out=None) -> torch.Tensor:
        """Once per layer. K and V of the new tokens are in the pool already."""
        self.check_layer(layer)
        output = attention_output(q, layer, out)
        for request in plan:
            output[request.rows] = self.run_request(q[request.rows], layer, request)
        return output

    # --8<-- [end:plan-and-run]

    # --8<-- [start:blocks-of-keys]
    def run_request(self, q: torch.Tensor, layer: AttentionLayer, request: Request) -> torch.Tensor:
        q = q.float().unflatten(1, (layer.num_kv_heads, -1)) * layer.scale
        total = torch.zeros_like(q[..., :1])  # [queries, KV heads, group, 1]
        largest = torch.full_like(total, -torch.inf)
        output = torch.zeros_like(q)
        for start in range(0, len(request.slots), KEYS_PER_BLOCK):
            slots = request.slots[start : start + KEYS_PER_BLOCK]
            k = self.kv_pool.k_buffer(layer.layer_id)[slots].float()
            v = self.kv_pool.v_buffer(layer.layer_id)[slots].float()
            scores = torch.einsum("qhgd,nhd->qhgn", q, k)
            if layer.logit_cap > 0:
                scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
            key_positions = start + torch.arange(len(slots), device=slots.device)
            is_visible = key_positions <= request.positions[:, None]
            scores = scores.masked_fill(~is_visible[:, None, None], -torch.inf)
            # What was summed relative to the old maximum is scaled to the new one.
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            scale = torch.exp(largest - new_largest)
            weights = torch.exp(scores - new_largest)
            total = total * scale + weights.sum(-1, keepdim=True)
            output = output * scale + torch.einsum("qhgn,nhd->qhgd", weights, v)
            largest = new_largest
        return (output / total).flatten(1, 2)

    # --8<-- [end:blocks-of-keys]
