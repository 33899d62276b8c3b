"""A step's batch: memory for its tokens, and the ForwardBatch that describes them.

Differs from reference: rows and slots of all requests are allocated and written in one call each. Nothing
waits for the device. A batch's numbers go over in one copy; a token that is not known yet has a name in the
FutureMap (optimized/overlap/future_map.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from diptych.shared.interfaces import SchedulerParts
from diptych.shared.sampling.logprobs import asked_input_ids, input_logprob_rows
from diptych.shared.scheduling.pages import evict_for, round_up_to_page, rows_of
from diptych.shared.scheduling.select_embeds import embeds_of_step, rope_positions_of_step
from diptych.shared.to_device import ALIGNMENT, copy_to_device, pinned, vectors_to_device
from diptych.shared.types import ForwardBatch, ForwardMode, Req, ScheduleBatch


def prepare_for_extend(reqs: list[Req], parts: SchedulerParts) -> ScheduleBatch:
    """Rows and slots for every request's fill_ids; a request that goes on with its prompt keeps its row."""
    pool, allocator = parts.req_to_token_pool, parts.allocator
    new_reqs = [req for req in reqs if req.req_pool_idx is None]
    rows = pool.alloc(len(new_reqs))
    assert rows is not None, f"no row for {len(new_reqs)} requests: admission checks this"
    for req, row in zip(new_reqs, rows):
        req.req_pool_idx = row
        req.kv_matched_len = len(req.prefix_indices)
    if new_reqs:
        found = [req.prefix_indices for req in new_reqs]
        pool.write_ragged(rows, [0] * len(rows), [len(slots) for slots in found], torch.cat(found))

    prefix_lens = [len(req.prefix_indices) for req in reqs]
    seq_lens = [len(req.fill_ids) for req in reqs]
    page = allocator.page_size
    evict_for(
        sum(round_up_to_page(s, page) - round_up_to_page(p, page) for p, s in zip(prefix_lens, seq_lens)),
        parts.tree_cache,
        allocator,
    )
    # --8<-- [start:slots-for-an-extension]
    # Most prefixes end with a page: then their ends do not matter, and no device is asked.
    last_locs = [int(req.prefix_indices[-1]) if n % page else -1 for req, n in zip(reqs, prefix_lens)]
    slots = allocator.alloc_extend(prefix_lens, seq_lens, last_locs)
    assert slots is not None, "no slots for an extension: admission checks this"
    extend_lens = [seq_len - prefix_len for prefix_len, seq_len in zip(prefix_lens, seq_lens)]
    pool.write_ragged(rows_of(reqs), prefix_lens, extend_lens, slots)
    # --8<-- [end:slots-for-an-extension]
    for req, seq_len in zip(reqs, seq_lens):
        req.kv_committed_len = req.kv_allocated_len = seq_len
    return ScheduleBatch(list(reqs), ForwardMode.EXTEND, len(reqs), out_cache_loc=slots)


def prepare_for_decode(reqs: list[Req], parts: SchedulerParts, num_steps: int = 1) -> ScheduleBatch | None:
    """One slot for each request's newest token, and for those that it samples before the last step. None:
    there is no memory for one of each."""
    pool, allocator = parts.req_to_token_pool, parts.allocator
    num_new_pages = sum(req.kv_committed_len % allocator.page_size == 0 for req in reqs)
    if num_steps == 1 and not evict_for(num_new_pages * allocator.page_size, parts.tree_cache, allocator):
        return None
    rows, positions = rows_of(reqs), [req.kv_committed_len for req in reqs]
    last_locs = pool.read_each(rows, [position - 1 for position in positions])
    ends = [position + num_steps for position in positions]
    if num_steps == 1:
        slots = allocator.alloc_decode(ends, last_locs)
    else:
        slots = allocator.alloc_extend(positions, ends, last_locs)
    assert slots is not None, "no slots to decode, though there is memory for them"
    pool.write_ragged(rows, positions, [num_steps] * len(rows), slots)
    for req, end in zip(reqs, ends):
        req.kv_committed_len = req.kv_allocated_len = end
    slots = slots if num_steps == 1 else slots.view(-1, num_steps).t().flatten()
    return ScheduleBatch(list(reqs), ForwardMode.DECODE, out_cache_loc=slots, num_steps=num_steps)


def make_forward_batch(
    batch: ScheduleBatch, newest_ids: Sequence[int], num_token_ids: int, device: torch.device
) -> ForwardBatch:
    """The batch as tensors, of several steps the first. newest_ids: the input of each request that decodes;
    below zero, a name in the FutureMap. Call it once memory is allocated and before results are processed."""
    assert batch.out_cache_loc is not None
    if batch.forward_mode is ForwardMode.DECODE:
        return _decode_batch(batch, newest_ids, device)
    extending, decoding = batch.reqs[: batch.num_extend_reqs], batch.reqs[batch.num_extend_reqs :]

    # --8<-- [start:ragged-tokens]
    input_ids: list[int] = []
    for req in extending:
        input_ids += req.fill_ids[len(req.prefix_indices) :]
    input_ids += newest_ids
    seq_lens = [req.kv_committed_len for req in batch.reqs]
    extend_seq_lens = [req.extend_input_len for req in extending] + [1] * len(decoding)
    start_locs = [0, *accumulate(extend_seq_lens)][:-1]
    # --8<-- [end:ragged-tokens]
    logprob_rows, logprob_ids = input_logprob_rows(extending, start_locs)
    ids, rows, lens, extend_lens, starts, *wanted = vectors_to_device(
        [
            input_ids,
            rows_of(batch.reqs),
            seq_lens,
            extend_seq_lens,
            start_locs,
            logprob_rows,
            logprob_ids,
        ],
        device,
    )
    has_embeds = any(req.embeds is not None for req in batch.reqs)
    embed_rows, embeds = embeds_of_step(extending, start_locs, device) if has_embeds else (None, None)
    places = rope_positions_of_step(batch.reqs, seq_lens, extend_seq_lens, device) if has_embeds else None
    before = starts - (lens - extend_lens)  # row of the batch minus position
    num_tokens = len(input_ids)
    shifts = before.repeat_interleave(extend_lens, output_size=num_tokens)
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        input_ids=ids,
        positions=torch.arange(num_tokens, device=device) - shifts,
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=copy_to_device(batch.out_cache_loc, device),
        extend_seq_lens=extend_lens,
        extend_start_loc=starts,
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=tuple(extend_seq_lens),
        rows_cpu=tuple(rows_of(batch.reqs)),
        input_logprob_rows=wanted[0] if logprob_rows else None,
        input_logprob_ids=wanted[1] if logprob_rows else None,
        num_top_input_logprobs=max((req.sampling_params.top_logprobs_num for req in extending), default=0),
        input_asked_ids=asked_input_ids(extending, device) if logprob_rows else None,
        num_token_ids=num_token_ids,
        embed_rows=embed_rows,
        embeds=embeds,
        rope_positions=places,
        custom_mask=_custom_mask(batch, seq_lens, extend_seq_lens, device),
    )


def _custom_mask(
    batch: ScheduleBatch, seq_lens: list[int], extend_lens: list[int], device: torch.device
) -> torch.Tensor | None:
    has_blocks = any(req.diffusion is not None for req in batch.reqs[: batch.num_extend_reqs])
    return visible_in_blocks(batch.reqs, seq_lens, extend_lens, device) if has_blocks else None


def visible_in_blocks(
    reqs: Sequence[Req], seq_lens: Sequence[int], extend_lens: Sequence[int], device: torch.device
) -> torch.Tensor:
    """`ForwardBatch.custom_mask`: a token of a request with block diffusion sees its own block and earlier
    ones, a token of another request itself and earlier ones. Written in place: masks of prompts are large."""
    sizes = [seq_len * extend_len for seq_len, extend_len in zip(seq_lens, extend_lens)]
    mask = torch.empty(sum(sizes), dtype=torch.bool, device=device)
    for req, seq_len, extend_len, part in zip(reqs, seq_lens, extend_lens, mask.split(sizes)):
        positions = torch.arange(seq_len, device=device)
        block = positions if req.diffusion is None else positions // req.diffusion.block_len
        torch.le(block, block[seq_len - extend_len :, None], out=part.view(extend_len, seq_len))
    return mask


def _decode_batch(batch: ScheduleBatch, newest_ids: Sequence[int], device: torch.device) -> ForwardBatch:
    """A decode batch with all tensors in one copy, because a step of a small model leaves the CPU little
    time."""
    bs, slots = batch.batch_size, batch.slots_of_steps[0]
    seq_lens = [req.kv_committed_len - batch.num_steps + 1 for req in batch.reqs]
    has_images = any(req.embeds is not None for req in batch.reqs)
    numbers = pinned(7 + has_images, -(-bs // ALIGNMENT) * ALIGNMENT, device=device)
    ids, positions, rows, lens, slots_row, extend_lens, starts, *rope_positions = numbers.numpy()[:, :bs]
    ids[:] = newest_ids
    lens[:] = seq_lens
    positions[:] = lens - 1
    rows[:] = rows_cpu = rows_of(batch.reqs)
    extend_lens[:] = 1
    starts[:] = range(bs)
    if has_images:
        rope_positions[0][:] = positions + [req.rope_delta for req in batch.reqs]
    is_on_host = not slots.is_cuda
    if is_on_host:
        slots_row[:] = slots.numpy()
    vectors = numbers.to(device, non_blocking=True)[:, :bs].unbind()
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        input_ids=vectors[0],
        positions=vectors[1],
        req_pool_indices=vectors[2],
        seq_lens=vectors[3],
        out_cache_loc=vectors[4] if is_on_host else slots,
        extend_seq_lens=vectors[5],
        extend_start_loc=vectors[6],
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=(1,) * bs,
        rows_cpu=tuple(rows_cpu),
        rope_positions=vectors[7] if has_images else None,
    )
