"""This project's kernels for operations whose components have another interface. They need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.types import SamplingBatchInfo
from diptych.shared.types.quant_scheme import QuantScheme

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.oracles.mla_batches import MLABatch

Call = Callable[[], torch.Tensor]


def on_gpu(make: Callable[..., Call], *args: object) -> Call | None:
    """The function on a CUDA GPU; elsewhere None."""
    return make(*args) if check_device().type == "cuda" else None


def mla_decode(batch: MLABatch, q: torch.Tensor) -> Call:
    """q [batch, num_qo_heads, kv_lora_rank + qk_rope_head_dim], absorbed -> [batch, num_qo_heads,
    kv_lora_rank], over the pool of the batch."""
    from diptych.shared.tools.conformance.oracles.attention_batches import LAYER_ID

    decode = registry.load_part("mla_decode").mla_decode
    rows, step, case = batch.kv_pool.k_buffer(LAYER_ID), batch.forward_batch, batch.case
    counters = torch.zeros(q.shape[0] * q.shape[1], dtype=torch.int32, device=q.device)
    table = batch.req_to_token_pool.req_to_token
    return lambda: decode(
        q, rows, table, step.req_pool_indices, step.seq_lens, counters,
        kv_lora_rank=case.kv_lora_rank, scale=batch.layer.scale, page_size=case.page_size,
    )  # fmt: skip


def w8a8(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> Call:
    """a int8 [num_tokens, size], b int8 [out, size], scales float32 [num_tokens, 1] and [out, 1] -> `dtype`
    [num_tokens, out]."""
    kernels = registry.load_part("quantized_gemm")
    x, scheme = kernels.QuantizedInput(a, scale_a, dtype), QuantScheme("int8", inputs="token")

    def call() -> torch.Tensor:
        y = torch.empty(len(a), len(b), dtype=dtype, device=a.device)
        kernels.quantized_gemm(x, b, scale_b, None, scheme, y)
        return y

    return call


def sampler(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor | None = None,
) -> Call:
    """logits float32 [num_rows, vocab_size] -> token ids int64 [num_rows]. Each row has a seed of its own: of
    `seeds` int64 [num_rows], or its number."""
    own = registry.load("sampler", "optimized")()
    rows = torch.arange(len(logits), device=logits.device)
    info = SamplingBatchInfo(
        temperatures=temperature,
        top_ks=top_k.long(),
        top_ps=top_p,
        min_ps=torch.zeros_like(top_p),
        seeds=rows if seeds is None else seeds,
        is_greedy=torch.zeros_like(rows, dtype=torch.bool),
        is_all_greedy=False,
        needs_filter=bool((top_k < logits.shape[1]).any() or (top_p < 1).any()),
    )
    return lambda: own.sample(logits, info, rows).next_token_ids


def verify(draft_token_ids: torch.Tensor, target_probs: torch.Tensor) -> Call:
    """draft_token_ids int32 [num_rows, n], target_probs float32 [num_rows, n + 1, vocab_size] -> token ids
    int64 [num_rows, n + 1], -1 after the last one. The target is sampled at each place, and drafts that equal
    the samples are accepted: the tokens follow the target, and the draft's probabilities are not needed."""
    tree_ops = registry.load("draft_tree", "optimized")()
    num_rows, num_places, vocab_size = target_probs.shape
    logits = target_probs.log().flatten(0, 1)
    ones = torch.ones(len(logits), device=logits.device)
    sample = sampler(logits, ones, (ones * vocab_size).int(), ones)
    token_ids = torch.nn.functional.pad(draft_token_ids.long(), (1, 0))  # the root's is not read
    places = torch.arange(num_places, device=logits.device)
    parents = (places - 1).repeat(num_rows, 1)
    tree = tree_ops.from_parents(token_ids, parents, torch.full_like(token_ids[:, 0], num_places))

    def call() -> torch.Tensor:
        accepted: torch.Tensor = tree_ops.accept(tree, sample().view(num_rows, num_places)).token_ids
        return accepted

    return call
