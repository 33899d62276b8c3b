"""Attention in plain PyTorch: gather K and V by slot, masked softmax in float32, weighted sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from shared.interfaces import attention as interface
from shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from shared.modeling.forward import attention_output
from shared.types import ForwardBatch
from shared.types.attention import AttentionLayer

# Queries of one request computed at once: bounds the [queries, keys] scores of a long prompt.
MAX_QUERIES_PER_BLOCK = 128
# Requests with as few queries as this (decode, drafted trees) are computed together, padded to the longest.
MAX_QUERIES_TO_BATCH = 16


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Queries computed together: `num_queries` consecutive ones of each of bs consecutive requests.

    Slots beyond a request's length repeat its last slot: what they hold is finite, and masked.
    """

    token_start: int  # first row of q
    num_queries: int
    query_positions: torch.Tensor  # [bs, num_queries]
    key_positions: torch.Tensor  # [1 or bs, num_keys]
    slots: torch.Tensor  # [bs, num_keys]
    custom_mask: torch.Tensor | None  # bool [bs, num_queries, num_keys]; None: causal

    @property
    def token_end(self) -> int:
        return self.token_start + self.slots.shape[0] * self.num_queries

    def restrict_to_window(self, sliding_window: int) -> AttentionBlock:
        """Without the keys that no query of the block has in its window."""
        num_keys = sliding_window + self.num_queries
        if num_keys >= self.slots.shape[1]:
            return self
        start = (self.query_positions[:, :1] - sliding_window).clamp(min=0)
        key_positions = start + torch.arange(num_keys, device=self.slots.device)
        columns = key_positions.clamp(max=self.slots.shape[1] - 1)
        custom_mask = self.custom_mask
        if custom_mask is not None:
            custom_mask = custom_mask.gather(2, columns[:, None].expand(-1, self.num_queries, -1))
        slots = self.slots.gather(1, columns)
        return replace(self, key_positions=key_positions, slots=slots, custom_mask=custom_mask)

    def visible(self, sliding_window: int) -> torch.Tensor:
        """bool [bs, num_queries, num_keys]: which query sees which key."""
        query_positions, key_positions = self.query_positions[:, :, None], self.key_positions[:, None, :]
        visible = key_positions <= query_positions if self.custom_mask is None else self.custom_mask
        if sliding_window >= 0:
            visible = visible & (key_positions >= query_positions - sliding_window)
        return visible


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    blocks: list[AttentionBlock]


class TorchAttention(interface.AttentionBackend):
    """Supports every layer and every batch of the contract."""

    accepts_seq_len_upper_bounds = True

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool

    # --8<-- [start:attention-plan]
    def plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        blocks: list[AttentionBlock] = []
        token_start = mask_start = 0
        for first, last in _batched_requests(forward_batch):
            num_queries = forward_batch.extend_seq_lens_cpu[first]
            seq_lens = forward_batch.seq_lens_cpu[first:last]
            whole = self._block(forward_batch, first, last, token_start, mask_start)
            blocks.extend(_split_queries(whole))
            token_start += num_queries * len(seq_lens)
            mask_start += num_queries * sum(seq_lens)
        return AttentionPlan(blocks)
        # --8<-- [end:attention-plan]

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: AttentionPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = attention_output(q, layer, out)
        for block in plan.blocks:
            rows = slice(block.token_start, block.token_end)
            output[rows] = self._run_block(q[rows], layer, block)
        return output

    def _block(
        self, forward_batch: ForwardBatch, first: int, last: int, token_start: int, mask_start: int
    ) -> AttentionBlock:
        """All queries of the requests [first, last), which have equally many."""
        num_queries = forward_batch.extend_seq_lens_cpu[first]
        seq_lens_cpu = forward_batch.seq_lens_cpu[first:last]
        seq_lens = forward_batch.seq_lens[first:last, None]
        device = seq_lens.device
        key_positions = torch.arange(max(seq_lens_cpu), device=device)[None]
        rows = forward_batch.req_pool_indices[first:last, None]
        slots = self.req_to_token_pool.req_to_token[rows, torch.minimum(key_positions, seq_lens - 1)]

        custom_mask = None
        if forward_batch.custom_mask is not None:
            custom_mask = torch.zeros(
                last - first, num_queries, max(seq_lens_cpu), dtype=torch.bool, device=device
            )
            for i, seq_len in enumerate(seq_lens_cpu):
                mask_end = mask_start + num_queries * seq_len
                rows_of_mask = forward_batch.custom_mask[mask_start:mask_end].view(num_queries, seq_len)
                custom_mask[i, :, :seq_len] = rows_of_mask
                mask_start = mask_end
        if forward_batch.tree_mask is not None:
            tree_mask = forward_batch.tree_mask[first:last]
            columns = key_positions - (seq_lens - tree_mask.shape[2])  # below 0: before the tree
            in_tree = columns.clamp(0, tree_mask.shape[2] - 1)[:, None].expand(-1, num_queries, -1)
            custom_mask = (tree_mask.gather(2, in_tree) | (columns < 0)[:, None]) & (
                key_positions < seq_lens
            )[:, None]
        return AttentionBlock(
            token_start=token_start,
            num_queries=num_queries,
            query_positions=seq_lens - num_queries + torch.arange(num_queries, device=device),
            key_positions=key_positions,
            slots=slots.to(torch.int64),
            custom_mask=custom_mask,
        )

    def _run_block(self, q: torch.Tensor, layer: AttentionLayer, block: AttentionBlock) -> torch.Tensor:
        if layer.sliding_window >= 0:
            block = block.restrict_to_window(layer.sliding_window)
        bs, num_keys = block.slots.shape
        num_queries, num_kv_heads = block.num_queries, layer.num_kv_heads
        group_size = layer.num_qo_heads // num_kv_heads
        dtype = torch.promote_types(q.dtype, torch.float32)

        # The query heads that read one KV head, and their queries, are the rows of one matrix product.
        queries = q.to(dtype).view(bs, num_queries, num_kv_heads, group_size, layer.head_dim)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(bs, num_kv_heads, -1, layer.head_dim)
        # --8<-- [start:gather-and-score]
        # K and V by rows of one head and one slot: head-major at once, where a transpose would copy again.
        # The gathered keys are dropped before the values are gathered: the same memory serves both.
        heads = torch.arange(num_kv_heads, device=q.device)[:, None]
        head_slots = block.slots[:, None, :] * num_kv_heads + heads  # [bs, num_kv_heads, num_keys]
        k_buffer, v_buffer = self.kv_pool.k_buffer(layer.layer_id), self.kv_pool.v_buffer(layer.layer_id)
        scores = (queries * layer.scale) @ _gather(k_buffer, head_slots).to(dtype).transpose(-1, -2)
        if layer.logit_cap > 0:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = scores.view(bs, num_kv_heads, group_size, num_queries, num_keys)
        visible = block.visible(layer.sliding_window)[:, None, None]
        scores.masked_fill_(~visible, float("-inf"))
        if layer.sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            sinks = layer.sinks.to(dtype).view(1, num_kv_heads, group_size, 1, 1)
            scores = torch.cat([scores, sinks.expand(bs, -1, -1, num_queries, 1)], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., :-1]
            # --8<-- [end:gather-and-score]
        if block.custom_mask is not None:
            # A query that sees nothing had a softmax over -inf only: NaN.
            weights = weights.masked_fill(~visible, 0.0)

        weights = weights.reshape(bs, num_kv_heads, group_size * num_queries, num_keys)
        output = weights @ _gather(v_buffer, head_slots).to(dtype)
        output = output.view(bs, num_kv_heads, group_size, num_queries, layer.head_dim)
        return output.permute(0, 3, 1, 2, 4).reshape(q.shape).to(q.dtype)


def _batched_requests(forward_batch: ForwardBatch) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of requests to compute together: equally many queries, few of them, and lengths
    near enough that padding at most doubles the work. Requests without a query are left out."""
    num_queries, seq_lens = forward_batch.extend_seq_lens_cpu, forward_batch.seq_lens_cpu
    first = 0
    while first < forward_batch.batch_size:
        last, longest, total = first + 1, seq_lens[first], seq_lens[first]
        while last < forward_batch.batch_size and num_queries[last] == num_queries[first]:
            longest, total = max(longest, seq_lens[last]), total + seq_lens[last]
            if num_queries[first] > MAX_QUERIES_TO_BATCH or longest * (last + 1 - first) > 2 * total:
                break
            last += 1
        if num_queries[first] > 0:
            yield first, last
        first = last


def _split_queries(block: AttentionBlock) -> Iterator[AttentionBlock]:
    """A long causal block in pieces of MAX_QUERIES_PER_BLOCK queries, each with the keys up to its last one.
    (A masked block's queries may see later keys; trees of drafts are small anyway.)"""
    if block.num_queries <= MAX_QUERIES_PER_BLOCK or block.custom_mask is not None:
        yield block
        return
    assert block.slots.shape[0] == 1
    prefix_len = block.slots.shape[1] - block.num_queries
    for start in range(0, block.num_queries, MAX_QUERIES_PER_BLOCK):
        end = min(start + MAX_QUERIES_PER_BLOCK, block.num_queries)
        yield AttentionBlock(
            token_start=block.token_start + start,
            num_queries=end - start,
            query_positions=block.query_positions[:, start:end],
            key_positions=block.key_positions[:, : prefix_len + end],
            slots=block.slots[:, : prefix_len + end],
            custom_mask=None,
        )


def _gather(buffer: torch.Tensor, head_slots: torch.Tensor) -> torch.Tensor:
    """buffer [num_slots, num_kv_heads, head_dim] -> [bs, num_kv_heads, num_keys, head_dim]."""
    return buffer.flatten(0, 1).index_select(0, head_slots.flatten()).view(*head_slots.shape, -1)
