"""Pages and slots: rounding of lengths to pages, and memory for a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import torch

from diptych.shared.interfaces import PrefixCache, ReqToTokenPool, TokenToKVPoolAllocator
from diptych.shared.types import ForwardMode, Req, ScheduleBatch

Count = TypeVar("Count", int, npt.NDArray[Any])


def num_pages_of(num_tokens: Count, page_size: int) -> Count:
    """Pages that hold `num_tokens` tokens; the last page may be partial."""
    return -(-num_tokens // page_size)


def round_up_to_page(num_tokens: Count, page_size: int) -> Count:
    """Slots of the pages that hold `num_tokens` tokens."""
    return num_pages_of(num_tokens, page_size) * page_size


def round_down_to_page(num_tokens: Count, page_size: int) -> Count:
    """The most tokens, at most `num_tokens`, that fill whole pages."""
    return num_tokens // page_size * page_size


def evict_for(num_tokens: int, tree_cache: PrefixCache, allocator: TokenToKVPoolAllocator) -> bool:
    """Make room for so many tokens, evicting only what is missing. False when there is not so much."""
    missing = num_tokens - allocator.available_size()
    if missing > 0:
        tree_cache.evict(missing)
    return allocator.available_size() >= num_tokens


def retraction_order(running: Sequence[Req]) -> list[Req]:
    """Sort requests in the order in which to keep them when memory is short: those with the fewest output
    tokens lose the least work, and among them a long prompt frees the most."""
    return sorted(running, key=lambda req: (-len(req.output_ids), len(req.origin_input_ids)))


def prepare_for_extend(
    reqs: list[Req],
    req_to_token_pool: ReqToTokenPool,
    allocator: TokenToKVPoolAllocator,
    tree_cache: PrefixCache,
) -> ScheduleBatch:
    """Rows and slots for every request's fill_ids; a request that goes on with its prompt keeps its row."""
    new_reqs = [req for req in reqs if req.req_pool_idx is None]
    rows = req_to_token_pool.alloc(len(new_reqs))
    assert rows is not None, f"no row for {len(new_reqs)} requests: admission checks this"
    for req, row in zip(new_reqs, rows):
        req.req_pool_idx = row
        req.kv_matched_len = len(req.prefix_indices)
    if new_reqs:
        found = [req.prefix_indices for req in new_reqs]
        req_to_token_pool.write_ragged(
            rows, [0] * len(rows), [len(slots) for slots in found], torch.cat(found)
        )

    # --8<-- [start:slots-for-an-extension]
    prefix_lens = [len(req.prefix_indices) for req in reqs]
    seq_lens = [len(req.fill_ids) for req in reqs]
    page = allocator.page_size
    # Most prefixes end with a page: then their ends do not matter, and no device is asked.
    last_locs = [int(req.prefix_indices[-1]) if n % page else -1 for req, n in zip(reqs, prefix_lens)]
    evict_for(
        sum(round_up_to_page(s, page) - round_up_to_page(p, page) for p, s in zip(prefix_lens, seq_lens)),
        tree_cache,
        allocator,
    )
    slots = allocator.alloc_extend(prefix_lens, seq_lens, last_locs)
    assert slots is not None, "no slots for an extension: admission checks this"
    extend_lens = [seq_len - prefix_len for prefix_len, seq_len in zip(prefix_lens, seq_lens)]
    req_to_token_pool.write_ragged(rows_of(reqs), prefix_lens, extend_lens, slots)
    for req, seq_len in zip(reqs, seq_lens):
        req.kv_committed_len = req.kv_allocated_len = seq_len
    # --8<-- [end:slots-for-an-extension]
    return ScheduleBatch(list(reqs), ForwardMode.EXTEND, len(reqs), out_cache_loc=slots)


def prepare_for_decode(
    reqs: list[Req],
    req_to_token_pool: ReqToTokenPool,
    allocator: TokenToKVPoolAllocator,
    tree_cache: PrefixCache,
) -> ScheduleBatch | None:
    """One slot for each request's newest token. None: there is no memory for all of them."""
    num_new_pages = sum(req.kv_committed_len % allocator.page_size == 0 for req in reqs)
    if not evict_for(num_new_pages * allocator.page_size, tree_cache, allocator):
        return None
    rows, positions = rows_of(reqs), [req.kv_committed_len for req in reqs]
    last_locs = req_to_token_pool.read_each(rows, [position - 1 for position in positions])
    slots = allocator.alloc_decode([position + 1 for position in positions], last_locs)
    assert slots is not None, "no slots to decode, though there is memory for them"
    req_to_token_pool.write_ragged(rows, positions, [1] * len(rows), slots)
    for req in reqs:
        req.kv_committed_len += 1
        req.kv_allocated_len = req.kv_committed_len
    return ScheduleBatch(list(reqs), ForwardMode.DECODE, out_cache_loc=slots)


def rows_of(reqs: Sequence[Req]) -> list[int]:
    """The rows of requests that have one."""
    rows = [req.req_pool_idx for req in reqs]
    assert None not in rows
    return rows  # type: ignore[return-value]


def mix(extend: ScheduleBatch, decode: ScheduleBatch) -> ScheduleBatch:
    """One batch of both: the decoding requests are extensions by one token, behind the others."""
    assert extend.out_cache_loc is not None
    assert decode.out_cache_loc is not None
    return ScheduleBatch(
        extend.reqs + decode.reqs,
        ForwardMode.MIXED,
        num_extend_reqs=extend.num_extend_reqs,
        out_cache_loc=torch.cat([extend.out_cache_loc, decode.out_cache_loc]),
    )
