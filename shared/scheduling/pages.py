"""Rounding of lengths to pages, and the room for a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, TypeVar

import numpy.typing as npt
import torch

from diptych.shared.interfaces import PrefixCache, TokenToKVPoolAllocator
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


def num_decode_steps(
    reqs: Sequence[Req],
    most: int,
    tree_cache: PrefixCache,
    allocator: TokenToKVPoolAllocator,
    nums_in_flight: Sequence[int] = (),
) -> int:
    """Decode steps that can be launched together, at most `most`, with room made for them. One, where the
    sampler of a request reads earlier tokens or gives more than a token, behind a prompt, whose token waits
    for what is launched next, or where memory is short. No request comes to its greatest length before the
    last step. nums_in_flight: tokens of each that it does not have yet."""
    # --8<-- [start:num-decode-steps]
    num_steps = most
    for req, num_in_flight in zip(reqs, nums_in_flight or repeat(0)):
        params, num_tokens = req.sampling_params, len(req.output_ids) + num_in_flight
        if req.needs_output or params.needs_penalty or params.return_logprob:
            return 1
        if num_tokens < max(params.min_new_tokens, 2):
            return 1
        num_steps = min(num_steps, req.max_new_tokens - num_tokens)
    page_size = allocator.page_size
    num_pages = sum(
        num_pages_of(req.kv_committed_len + num_steps, page_size)
        - num_pages_of(req.kv_committed_len, page_size)
        for req in reqs
    )
    has_room = num_pages * page_size <= allocator.available_size() + tree_cache.evictable_size()
    return num_steps if has_room and evict_for(num_pages * page_size, tree_cache, allocator) else 1
    # --8<-- [end:num-decode-steps]


def retraction_order(running: Sequence[Req]) -> list[Req]:
    """Sort requests in the order in which to keep them when memory is short: those with the fewest output
    tokens lose the least work, and among them a long prompt frees the most."""
    return sorted(running, key=lambda req: (-len(req.output_ids), len(req.origin_input_ids)))


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
