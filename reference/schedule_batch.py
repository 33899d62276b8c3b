"""A step's batch: memory for its tokens, request by request, and the ForwardBatch that describes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from diptych.shared.interfaces import SchedulerParts
from diptych.shared.sampling.logprobs import asked_input_ids, input_logprob_rows
from diptych.shared.scheduling.pages import evict_for, round_up_to_page
from diptych.shared.scheduling.select_embeds import embeds_of_step, rope_positions_of_step
from diptych.shared.types import ForwardBatch, ForwardMode, Req, ScheduleBatch


def prepare_for_extend(reqs: list[Req], parts: SchedulerParts) -> ScheduleBatch:
    """Rows and slots for every request's fill_ids; a request that goes on with its prompt keeps its row."""
    pool, allocator, page_size = parts.req_to_token_pool, parts.allocator, parts.allocator.page_size
    slots: list[torch.Tensor] = []
    for req in reqs:
        prefix_len, seq_len = len(req.prefix_indices), len(req.fill_ids)
        if req.req_pool_idx is None:
            rows = pool.alloc(1)
            assert rows is not None, "no row for a request: admission checks this"
            req.req_pool_idx = rows[0]
            req.kv_matched_len = prefix_len
            pool.write(req.req_pool_idx, 0, req.prefix_indices)
        num_new = round_up_to_page(seq_len, page_size) - round_up_to_page(prefix_len, page_size)
        evict_for(num_new, parts.tree_cache, allocator)
        # --8<-- [start:slots-for-an-extension]
        last_loc = int(req.prefix_indices[-1]) if prefix_len % page_size else -1
        new_slots = allocator.alloc_extend([prefix_len], [seq_len], [last_loc])
        assert new_slots is not None, "no slots for an extension: admission checks this"
        pool.write(req.req_pool_idx, prefix_len, new_slots)
        # --8<-- [end:slots-for-an-extension]
        req.kv_committed_len = req.kv_allocated_len = seq_len
        slots.append(new_slots)
    return ScheduleBatch(list(reqs), ForwardMode.EXTEND, len(reqs), out_cache_loc=torch.cat(slots))


def prepare_for_decode(reqs: list[Req], parts: SchedulerParts, num_steps: int = 1) -> ScheduleBatch | None:
    """One slot for each request's newest token, and for those that it samples before the last step. None:
    there is no memory for one of each."""
    pool, allocator, page_size = parts.req_to_token_pool, parts.allocator, parts.allocator.page_size
    num_new_pages = sum(req.kv_committed_len % page_size == 0 for req in reqs)
    if num_steps == 1 and not evict_for(num_new_pages * page_size, parts.tree_cache, allocator):
        return None
    slots: list[torch.Tensor] = []
    for req in reqs * num_steps:
        position, row = req.kv_committed_len, req.req_pool_idx
        assert row is not None
        last_loc = int(pool.read(row, position - 1, position))
        slot = allocator.alloc_decode([position + 1], [last_loc])
        assert slot is not None, "no slot to decode, though there is memory for it"
        pool.write(row, position, slot)
        req.kv_committed_len = req.kv_allocated_len = position + 1
        slots.append(slot)
    return ScheduleBatch(list(reqs), ForwardMode.DECODE, out_cache_loc=torch.cat(slots), num_steps=num_steps)


def make_forward_batch(
    batch: ScheduleBatch, newest_ids: Sequence[int], num_token_ids: int, device: torch.device
) -> ForwardBatch:
    """The batch as tensors, of several steps the first. newest_ids: the input of each request that decodes.
    Call it once memory is allocated and before any result is processed."""
    assert batch.out_cache_loc is not None
    out_cache_loc = batch.out_cache_loc if batch.num_steps == 1 else batch.slots_of_steps[0]
    extending, decoding = batch.reqs[: batch.num_extend_reqs], batch.reqs[batch.num_extend_reqs :]

    # --8<-- [start:ragged-tokens]
    input_ids: list[int] = []
    for req in extending:
        input_ids += req.fill_ids[len(req.prefix_indices) :]
    input_ids += newest_ids
    seq_lens = [req.kv_committed_len - batch.num_steps + 1 for req in batch.reqs]
    extend_seq_lens = [req.extend_input_len for req in extending] + [1] * len(decoding)
    start_locs = [0, *accumulate(extend_seq_lens)][:-1]
    # --8<-- [end:ragged-tokens]

    tensor = partial(torch.tensor, dtype=torch.int64, device=device)
    if extending:
        positions = torch.cat(
            [torch.arange(s - e, s, device=device) for s, e in zip(seq_lens, extend_seq_lens)]
        )
    else:
        positions = tensor(seq_lens) - 1
    rows, ids = list[int](), list[int]()
    if any(req.next_input_logprob is not None for req in extending):
        rows, ids = input_logprob_rows(extending, start_locs)
    has_embeds = any(req.embeds is not None for req in batch.reqs)
    embed_rows, embeds = embeds_of_step(extending, start_locs, device) if has_embeds else (None, None)
    places = rope_positions_of_step(batch.reqs, seq_lens, extend_seq_lens, device) if has_embeds else None
    custom_mask = None
    if any(req.diffusion is not None for req in extending):
        custom_mask = visible_in_blocks(batch.reqs, seq_lens, extend_seq_lens, device)
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        input_ids=tensor(input_ids),
        positions=positions,
        req_pool_indices=tensor([req.req_pool_idx for req in batch.reqs]),
        seq_lens=tensor(seq_lens),
        out_cache_loc=out_cache_loc.to(device),
        extend_seq_lens=tensor(extend_seq_lens),
        extend_start_loc=tensor(start_locs),
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=tuple(extend_seq_lens),
        input_logprob_rows=tensor(rows) if rows else None,
        input_logprob_ids=tensor(ids) if rows else None,
        num_top_input_logprobs=max((req.sampling_params.top_logprobs_num for req in extending), default=0),
        input_asked_ids=asked_input_ids(extending, device) if rows else None,
        num_token_ids=num_token_ids,
        embed_rows=embed_rows,
        embeds=embeds,
        rope_positions=places,
        custom_mask=custom_mask,
    )


def visible_in_blocks(
    reqs: Sequence[Req], seq_lens: Sequence[int], extend_lens: Sequence[int], device: torch.device
) -> torch.Tensor:
    """`ForwardBatch.custom_mask`: a token of a request with block diffusion sees its own
    block and earlier ones, a token of another request itself and earlier ones."""
    masks = []
    for req, seq_len, extend_len in zip(reqs, seq_lens, extend_lens):
        positions = torch.arange(seq_len, device=device)
        block = positions if req.diffusion is None else positions // req.diffusion.block_len
        masks.append((block <= block[seq_len - extend_len :, None]).flatten())
    return torch.cat(masks)
