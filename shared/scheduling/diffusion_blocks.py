"""Blocks of requests with block diffusion: their place, their known tokens, their slots."""

from __future__ import annotations

from diptych.shared.interfaces import SchedulerParts
from diptych.shared.scheduling.pages import rows_of
from diptych.shared.types import DiffusionParams, Req


def params_of(req: Req) -> DiffusionParams:
    assert req.diffusion is not None
    return req.diffusion


def block_of(req: Req) -> tuple[int, int]:
    """The positions [start, end) of the first block that is not complete."""
    block_len = params_of(req).block_len
    start = req.num_tokens // block_len * block_len
    return start, start + block_len


def block_ids(req: Req) -> list[int]:
    """Its known tokens, then masks."""
    start, end = block_of(req)
    known = req.all_ids[start:]
    return known + [params_of(req).mask_id] * (end - start - len(known))


def take_block_slots(reqs: list[Req], parts: SchedulerParts) -> None:
    """Allocate slots to the end of each request's block. The caller has made room."""
    # --8<-- [start:diffusion-slots]
    pool, rows = parts.req_to_token_pool, rows_of(reqs)
    starts, ends = [req.kv_committed_len for req in reqs], [block_of(req)[1] for req in reqs]
    last_locs = pool.read_each(rows, [start - 1 for start in starts])
    slots = parts.allocator.alloc_extend(starts, ends, last_locs)
    assert slots is not None
    pool.write_ragged(rows, starts, [end - start for start, end in zip(starts, ends)], slots)
    for req, end in zip(reqs, ends):
        req.kv_committed_len = req.kv_allocated_len = end
    # --8<-- [end:diffusion-slots]
