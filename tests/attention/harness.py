"""Attention batches over poisoned pools, and dense attention in float64 to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared import registry
from shared.types import ForwardBatch, ForwardMode
from shared.types.attention import AttentionLayer

# float32: sums of up to 300 products of order 1, exponentials among them: about 1e-6 relative each way.
# bfloat16 and float16: the result itself is rounded (2^-8 and 2^-11 relative), K and V are exact in the pool.
# float64: nothing may be computed below float64.
TOLERANCE = {
    torch.float32: {"atol": 2e-6, "rtol": 2e-5},
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-7},
    torch.float16: {"atol": 2e-4, "rtol": 2**-10},
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
}


@dataclass
class Case:
    """A batch over pools in which every slot that is not live, the dummy slot included, holds NaN."""

    backend: Any
    kv_pool: Any
    req_to_token_pool: Any
    forward_batch: ForwardBatch
    layer: AttentionLayer
    q: torch.Tensor

    def run(self) -> torch.Tensor:
        return self.backend.run(self.q, self.layer, self.backend.plan(self.forward_batch))

    def check(self) -> None:
        output = self.run()
        assert output.shape == self.q.shape
        assert output.dtype == self.q.dtype
        assert torch.isfinite(output).all()
        torch.testing.assert_close(output.double(), expected_output(self), **TOLERANCE[self.q.dtype])


def make_case(
    impl: str,
    seq_lens: Sequence[int],
    extend_seq_lens: Sequence[int],
    *,
    mode: ForwardMode = ForwardMode.EXTEND,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    custom_masks: Sequence[torch.Tensor] | None = None,
    layer_id: int = 1,
    **layer: Any,
) -> Case:
    """Pages of the requests are scattered over the pool. `custom_masks`: one [extend, seq] per request."""
    pools = registry.load("memory_pool", "reference")
    num_tokens = sum(-(-n // page_size) * page_size for n in seq_lens)
    size = num_tokens + 8 * page_size
    kv_pool = pools.TokenToKVPool(size, page_size, 2, num_kv_heads, head_dim, dtype, "cpu")
    req_to_token_pool = pools.ReqToTokenPool(len(seq_lens) + 2, max(seq_lens, default=1) + 3, "cpu")
    for i in range(2):
        kv_pool.k_buffer(i).fill_(float("nan"))
        kv_pool.v_buffer(i).fill_(float("nan"))
    pages = (torch.randperm(size // page_size) + 1).tolist()
    rows = list(reversed(req_to_token_pool.alloc(len(seq_lens))))
    slots_of = []
    for row, seq_len in zip(rows, seq_lens):
        starts = [pages.pop() * page_size for _ in range(0, seq_len, page_size)]
        slots = [start + offset for start in starts for offset in range(page_size)][:seq_len]
        slots_of.append(slots)
        live = torch.tensor(slots, dtype=torch.int64)
        req_to_token_pool.write(row, 0, live)
        shape = (seq_len, num_kv_heads, head_dim)
        kv_pool.store(layer_id, live, torch.randn(shape), torch.randn(shape))

    new = [(i, p) for i, (s, e) in enumerate(zip(seq_lens, extend_seq_lens)) for p in range(s - e, s)]
    extend = torch.tensor(extend_seq_lens, dtype=torch.int64)
    forward_batch = ForwardBatch(
        forward_mode=mode,
        input_ids=torch.zeros(len(new), dtype=torch.int64),
        positions=torch.tensor([p for _, p in new], dtype=torch.int64),
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        out_cache_loc=torch.tensor([slots_of[i][p] for i, p in new], dtype=torch.int64),
        extend_seq_lens=extend,
        extend_start_loc=extend.cumsum(0) - extend,
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=tuple(extend_seq_lens),
        custom_mask=None if custom_masks is None else torch.cat([m.flatten() for m in custom_masks]),
    )
    layer.setdefault("scale", head_dim**-0.5)
    attention_layer = AttentionLayer(layer_id, num_qo_heads, num_kv_heads, head_dim, **layer)
    backend = registry.load("attention", impl)(req_to_token_pool, kv_pool)
    q = torch.randn(len(new), num_qo_heads, head_dim).to(dtype)
    return Case(backend, kv_pool, req_to_token_pool, forward_batch, attention_layer, q)


def expected_output(case: Case) -> torch.Tensor:
    batch, layer = case.forward_batch, case.layer
    k_buffer = case.kv_pool.k_buffer(layer.layer_id).double()
    v_buffer = case.kv_pool.v_buffer(layer.layer_id).double()
    group_size = layer.num_qo_heads // layer.num_kv_heads
    output = torch.zeros(case.q.shape, dtype=torch.float64)
    token = mask_start = 0
    for i, seq_len in enumerate(batch.seq_lens_cpu):
        extend_len = batch.extend_seq_lens_cpu[i]
        slots = case.req_to_token_pool.req_to_token[batch.req_pool_indices[i], :seq_len].tolist()
        for p in range(seq_len - extend_len, seq_len):
            if batch.custom_mask is None:
                seen = [j for j in range(seq_len) if j <= p]
            else:
                row = batch.custom_mask[mask_start : mask_start + seq_len].tolist()
                seen = [j for j in range(seq_len) if row[j]]
                mask_start += seq_len
            if layer.sliding_window >= 0:
                seen = [j for j in seen if j >= p - layer.sliding_window]
            for h in range(layer.num_qo_heads):
                if not seen:
                    continue
                keys, values = (b[[slots[j] for j in seen], h // group_size] for b in (k_buffer, v_buffer))
                logits = layer.scale * (keys @ case.q[token, h].double())
                if layer.logit_cap > 0:
                    logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
                weights = logits.exp()  # of order 1: no maximum to subtract in float64
                total = weights.sum()
                if layer.sinks is not None:
                    total = total + layer.sinks[h].double().exp()
                output[token, h] = (weights / total) @ values
            token += 1
    return output


def tree_mask(parents: Sequence[int], prefix_len: int) -> torch.Tensor:
    """bool [n, prefix_len + n]: every node sees the prefix, itself and its ancestors."""
    n = len(parents)
    mask = torch.zeros(n, prefix_len + n, dtype=torch.bool)
    mask[:, :prefix_len] = True
    for node in range(n):
        ancestor = node
        while ancestor >= 0:
            mask[node, prefix_len + ancestor] = True
            ancestor = parents[ancestor]
    return mask
