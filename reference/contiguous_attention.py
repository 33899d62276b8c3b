"""Attention with one KV cache per request, for a `kv_cache` of yours in a whole engine.

The engine stores K and V in its paged pool as always. This backend gives each request a `KVCache` as well,
appends the new rows to it, and reads nothing else. It fills a new cache with the rows that it lacks from the
pool: a prefix that another request computed, or the rows before a draft that was refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.shared.interfaces import KVCache, ReqToTokenPool, TokenToKVPool
from diptych.shared.interfaces import attention as interface
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer


class RequestPlan(NamedTuple):
    rows: slice  # of q: the request's tokens
    slots: torch.Tensor  # int64 [num_keys], by position
    num_new: int
    cache: KVCache


def attention_over(cache_class: type[KVCache]) -> type[interface.AttentionBackend]:
    """The backend whose requests have a cache of this class."""
    return type("ContiguousAttention", (ContiguousAttention,), {"cache_class": cache_class})


class ContiguousAttention(interface.AttentionBackend):
    cache_class: type[KVCache]

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        if kv_pool.dtype in FP8_TYPES:
            raise ValueError("kv_cache_dtype: a kv_cache holds K and V in the dtype of the model")
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool
        self.last_plan: dict[int, RequestPlan] = {}  # by row of req_to_token

    def check_layer(self, layer: AttentionLayer) -> None:
        extras = {
            "sliding_window": layer.sliding_window >= 0,
            "attention_chunk": layer.attention_chunk > 0,
            "logit_cap": layer.logit_cap > 0,
            "sinks": layer.sinks is not None,
        }
        for name, is_set in extras.items():
            if is_set:
                raise ValueError(f"{name}: a kv_cache supports causal attention without extras")

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        if forward_batch.custom_mask is not None or forward_batch.tree_mask is not None:
            raise ValueError("custom_mask, tree_mask: a kv_cache supports causal attention without masks")
        table, last = self.req_to_token_pool.req_to_token, self.last_plan
        self.last_plan = {}
        start = 0
        for i, num_keys in enumerate(forward_batch.seq_lens.tolist()):
            row, num_new = int(forward_batch.req_pool_indices[i]), forward_batch.extend_seq_lens_cpu[i]
            slots = table[row, :num_keys].long()
            cache = self._kept(last.get(row), slots[: num_keys - num_new])
            rows = slice(start, start + num_new)
            self.last_plan[row] = RequestPlan(rows, slots, num_new, cache)
            start += num_new
        return list(self.last_plan.values())

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
        self.check_layer(layer)
        output = attention_output(q, layer, out)
        buffers = self.kv_pool.k_buffer(layer.layer_id), self.kv_pool.v_buffer(layer.layer_id)
        for request in plan:
            num_cached = len(request.slots) - request.num_new
            is_fresh = request.cache.num_tokens < num_cached
            missing = request.slots if is_fresh else request.slots[num_cached:]
            request.cache.append(layer.layer_id, *(buffer[missing] for buffer in buffers))
            output[request.rows] = request.cache.attend(layer.layer_id, q[request.rows], layer.scale)
        return output

    def _kept(self, last: RequestPlan | None, slots: torch.Tensor) -> KVCache:
        """The row's cache of the last step, if it holds these slots and nothing else; else an empty one."""
        num_layers, num_rows = self.kv_pool.num_layers, len(slots)
        if last is not None and num_rows > 0 and torch.equal(last.slots, slots):
            cache = last.cache
            is_whole = cache.num_tokens == num_rows  # not after a pass that failed
            if is_whole and all(len(cache.read(layer_id)[0]) == num_rows for layer_id in range(num_layers)):
                return cache
        return self.cache_class(num_layers)
