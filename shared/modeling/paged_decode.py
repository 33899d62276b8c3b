"""An attention backend from a single function, paged decode attention."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple

import torch

from diptych.shared.interfaces.attention import AttentionBackend
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.scheduling.pages import num_pages_of
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer


class PagedDecodePlan(NamedTuple):
    page_table: torch.Tensor  # int32 [num_tokens, max_pages]
    lens: torch.Tensor  # int32 [num_tokens]


class PagedDecodeAttention(AttentionBackend):
    """Runs `paged_decode` on every causal batch: each token of a prompt is a row of its own, which sees the
    tokens up to its position. Refuses masks, windows, soft-caps, sinks and unusual scales."""

    @staticmethod
    @abstractmethod
    def paged_decode(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        """q [num_rows, num_qo_heads, head_dim], contiguous; k, v [num_pages, page_size, num_kv_heads,
        head_dim], one layer of the pool -> the output, of q's shape and dtype. Row i sees its first
        lens[i] >= 1 tokens: token j is k[page_table[i, j // page_size], j % page_size]. page_table is int32
        [num_rows, max_pages]; its entries beyond a row's tokens are valid page ids without meaning. lens is
        int32 [num_rows]. Scores are multiplied by head_dim ** -0.5. Query head h reads KV head
        h // (num_qo_heads // num_kv_heads). K and V of other tokens are undefined, NaN included."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        _refuse_if(kv_pool.dtype in FP8_TYPES, "an FP8 kv_cache_dtype")
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool

    def check_layer(self, layer: AttentionLayer) -> None:
        _refuse_if(layer.sliding_window >= 0, "sliding_window")
        _refuse_if(layer.attention_chunk > 0, "attention_chunk")
        _refuse_if(layer.logit_cap > 0, "logit_cap")
        _refuse_if(layer.sinks is not None, "sinks")
        _refuse_if(not math.isclose(layer.scale, layer.head_dim**-0.5), f"scale {layer.scale:g}")

    def plan(self, forward_batch: ForwardBatch) -> PagedDecodePlan:
        _refuse_if(forward_batch.custom_mask is not None, "custom_mask")
        _refuse_if(forward_batch.tree_mask is not None, "tree_mask")
        page_size = self.kv_pool.page_size
        rows = torch.repeat_interleave(forward_batch.req_pool_indices, forward_batch.extend_seq_lens)
        num_slots = num_pages_of(max(forward_batch.seq_lens_cpu, default=0), page_size) * page_size
        first_slots = self.req_to_token_pool.req_to_token[rows, :num_slots:page_size]
        lens = forward_batch.positions + 1
        return PagedDecodePlan((first_slots // page_size).to(torch.int32), lens.to(torch.int32))

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: PagedDecodePlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.check_layer(layer)
        output = attention_output(q, layer, out)
        if q.shape[0] > 0:
            buffers = self.kv_pool.k_buffer(layer.layer_id), self.kv_pool.v_buffer(layer.layer_id)
            k_pages, v_pages = (x.unflatten(0, (-1, self.kv_pool.page_size)) for x in buffers)
            output.copy_(self.paged_decode(q.contiguous(), k_pages, v_pages, *plan))
        return output


def _refuse_if(is_unsupported: bool, what: str) -> None:
    if is_unsupported:
        raise ValueError(
            f"{what} is not supported: paged_decode supports causal layers of scale head_dim ** -0.5"
        )
