"""Attention by torch.nn.attention.flex_attention: one call for a batch, described by two small functions.

Differs from reference: requests are rows of a batch, padded to the longest, and a mask function says which
keys a query sees. On a GPU, torch compiles both functions into a kernel that skips blocks without a visible
key; elsewhere they are evaluated for every pair. A readable middle between the loop of the reference and the
Triton kernels, not a fast one: K and V are gathered in each layer, the mask is made anew in each step,
requests of unequal length waste work, and CUDA graphs do not work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from diptych.shared.interfaces import attention as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer

POOL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8_TYPES)


# On a CPU this is intended.
warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")


@dataclass(frozen=True, eq=False)
class FlexPlan:
    """A batch of bs requests of at most max_queries new tokens and max_keys keys."""

    tokens: tuple[torch.Tensor, torch.Tensor]  # [num_tokens] twice: request, and number among its new ones
    slots: torch.Tensor  # [bs, max_keys] int64
    is_key: torch.Tensor  # [bs, max_keys] bool: no padding
    seq_lens: torch.Tensor  # [bs]
    prefix_lens: torch.Tensor  # [bs]
    max_queries: int
    visible: torch.Tensor | None  # bool [bs, max_queries, max_keys], where the batch has a mask
    branches: torch.Tensor | None  # int64, the same shape: of trees, positions of keys along the branch
    block_masks: dict[tuple[int, int], BlockMask]  # by the layer's window and chunk

    def block_mask(self, window: int, chunk: int) -> BlockMask:
        """The mask of a layer with this window (-1: none) and this chunk (0: none)."""
        if (window, chunk) not in self.block_masks:
            # --8<-- [start:flex-mask]
            visible = self._visible_within(window, chunk)

            def sees(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                if visible is not None:
                    return visible[b, query, key]
                position = self.prefix_lens[b] + query
                is_seen = (key <= position) & (key < self.seq_lens[b])
                return _within(is_seen, position, key, window, chunk)

            (bs, max_keys), device = self.slots.shape, str(self.slots.device)
            self.block_masks[window, chunk] = create_block_mask(
                sees, bs, None, self.max_queries, max_keys, device=device
            )
            # --8<-- [end:flex-mask]
        return self.block_masks[window, chunk]

    def _visible_within(self, window: int, chunk: int) -> torch.Tensor | None:
        """`visible` of a layer with this window and this chunk."""
        if self.visible is None:
            return None
        if self.branches is not None:  # in a tree, positions count along the query's branch
            position, key = self.branches[:, :, -1:], self.branches
        else:
            numbers = torch.arange(self.max_queries, device=self.slots.device)
            position = (self.prefix_lens[:, None] + numbers)[:, :, None]
            key = torch.arange(self.slots.shape[1], device=self.slots.device)
        return _within(self.visible, position, key, window, chunk)


def _within(
    is_seen: torch.Tensor, position: torch.Tensor, key: torch.Tensor, window: int, chunk: int
) -> torch.Tensor:
    """`is_seen`, of keys within the window and the chunk of the position."""
    if window >= 0:
        is_seen = is_seen & (position - key <= window)
    if chunk > 0:
        is_seen = is_seen & (position // chunk == key // chunk)
    return is_seen


class FlexAttention(interface.AttentionBackend):
    """Supports every layer and every batch of the contract in float16, bfloat16 and float32, also with an FP8
    pool."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        if kv_pool.dtype not in POOL_DTYPES:
            raise ValueError(
                f"dtype {kv_pool.dtype} is not supported: FlexAttention supports pools of {POOL_DTYPES}"
            )
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool

    def plan(self, forward_batch: ForwardBatch) -> FlexPlan:
        batch, device = forward_batch, self.kv_pool.device
        lens, seq_lens = batch.extend_seq_lens, batch.seq_lens
        requests = torch.repeat_interleave(
            torch.arange(len(lens), device=device), lens, output_size=batch.num_tokens
        )
        numbers = torch.arange(batch.num_tokens, device=device) - batch.extend_start_loc[requests]
        positions = torch.arange(max(batch.seq_lens_cpu, default=0), device=device)
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices, : len(positions)]
        is_key = positions < seq_lens[:, None]
        max_queries = max(batch.extend_seq_lens_cpu, default=0)
        visible = _visible(batch, max_queries, len(positions))
        return FlexPlan(
            tokens=(requests, numbers),
            slots=slots.to(torch.int64) * is_key,  # padding reads the dummy page and is set to zero
            is_key=is_key,
            seq_lens=seq_lens,
            prefix_lens=seq_lens - lens,
            max_queries=max_queries,
            visible=visible,
            branches=None if visible is None or batch.tree_mask is None else visible.cumsum(dim=2) - 1,
            block_masks={},
        )

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: FlexPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = attention_output(q, layer, out)
        if len(q) == 0:
            return output
        # --8<-- [start:flex-run]
        queries = q.new_zeros(len(plan.slots), plan.max_queries, *q.shape[1:])
        queries[plan.tokens] = q
        buffers = self.kv_pool.k_buffer(layer.layer_id), self.kv_pool.v_buffer(layer.layer_id)
        kv_scales = self.kv_pool.kv_scales[layer.layer_id]
        keys, values = (
            buffer[plan.slots].to(q.dtype).masked_fill(~plan.is_key[..., None, None], 0.0)
            for buffer in buffers
        )
        heads, aux = _attend(q.device.type)(
            *(x.transpose(1, 2) for x in (queries, keys, values)),  # [bs, heads, tokens, dim]
            score_mod=_soft_cap(q.new_full((), layer.logit_cap, dtype=torch.float32))
            if layer.logit_cap > 0
            else None,
            block_mask=plan.block_mask(layer.sliding_window, layer.attention_chunk),
            scale=layer.scale * kv_scales.k,
            enable_gqa=layer.num_qo_heads != layer.num_kv_heads,
            return_aux=AuxRequest(lse=True),
            kernel_options=_kernel_options(plan.max_queries * layer.num_qo_heads // layer.num_kv_heads),
        )
        if layer.sinks is not None:  # a column without a value: a smaller share for the others
            share = torch.sigmoid(aux.lse - layer.sinks[:, None])
            heads = heads * share[..., None].to(heads.dtype)
        # --8<-- [end:flex-run]
        heads = heads * kv_scales.v  # 1, except of an FP8 pool
        return output.copy_(heads.transpose(1, 2)[plan.tokens])


def _kernel_options(num_rows: int) -> Any:
    """torch's kernel for fewer than 128 queries takes all query heads of a KV head as one block of rows, and
    refuses a batch if there are more than 128: then the other kernel computes it."""
    return {"FORCE_USE_FLEX_ATTENTION": True} if num_rows > 128 else None


def _soft_cap(cap: torch.Tensor) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _attend(device_type: str) -> Callable[..., Any]:
    """Call flex_attention: compiled on a GPU, for any lengths; elsewhere evaluated eagerly."""
    if device_type != "cuda":
        return flex_attention
    # Each kind of batch and layer is compiled. Beyond the limit torch evaluates the functions, which fails.
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 128)
    attend: Any = torch.compile(flex_attention, dynamic=True)
    return attend


def _visible(batch: ForwardBatch, max_queries: int, max_keys: int) -> torch.Tensor | None:
    """The mask of the batch, padded per request."""
    shapes = list(zip(batch.extend_seq_lens_cpu, batch.seq_lens_cpu))
    if batch.custom_mask is not None:
        flat = batch.custom_mask.split([n * m for n, m in shapes])
        blocks = [block.view(shape) for block, shape in zip(flat, shapes)]
    elif batch.tree_mask is not None:
        tail = batch.tree_mask.shape[2]
        blocks = [F.pad(mask, (m - tail, 0), value=True) for mask, (_, m) in zip(batch.tree_mask, shapes)]
    else:
        return None
    return torch.stack([F.pad(b, (0, max_keys - b.shape[1], 0, max_queries - len(b))) for b in blocks])
