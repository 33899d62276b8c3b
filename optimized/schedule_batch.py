"""The ForwardBatch that describes a step's tokens.

Differs from reference: nothing waits for the device. A batch's numbers go over in one copy; a token that is
not known yet has a name in the FutureMap (optimized/overlap/future_map.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from diptych.shared.sampling.logprobs import input_logprob_rows
from diptych.shared.scheduling.pages import rows_of
from diptych.shared.to_device import ALIGNMENT, copy_to_device, pinned, vectors_to_device
from diptych.shared.types import ForwardBatch, ForwardMode, ScheduleBatch


def make_forward_batch(
    batch: ScheduleBatch, newest_ids: Sequence[int], num_token_ids: int, device: torch.device
) -> ForwardBatch:
    """The batch as tensors. newest_ids: the input of each request that decodes; below zero, a name in the
    FutureMap. Call it once memory is allocated and before any result is processed."""
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
    before = starts - (lens - extend_lens)  # row of the batch minus position
    num_tokens = len(input_ids)
    positions = torch.arange(num_tokens, device=device)
    positions = positions - before.repeat_interleave(extend_lens, output_size=num_tokens)
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        input_ids=ids,
        positions=positions,
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=copy_to_device(batch.out_cache_loc, device),
        extend_seq_lens=extend_lens,
        extend_start_loc=starts,
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=tuple(extend_seq_lens),
        input_logprob_rows=wanted[0] if logprob_rows else None,
        input_logprob_ids=wanted[1] if logprob_rows else None,
        num_top_input_logprobs=max((req.sampling_params.top_logprobs_num for req in extending), default=0),
        num_token_ids=num_token_ids,
    )


def _decode_batch(batch: ScheduleBatch, newest_ids: Sequence[int], device: torch.device) -> ForwardBatch:
    """A decode batch with all tensors in one copy, because a step of a small model leaves the CPU little
    time."""
    bs, slots = batch.batch_size, batch.out_cache_loc
    assert slots is not None
    seq_lens = [req.kv_committed_len for req in batch.reqs]
    numbers = pinned(7, -(-bs // ALIGNMENT) * ALIGNMENT, device=device)
    ids, positions, rows, lens, slots_row, extend_lens, starts = numbers.numpy()[:, :bs]
    ids[:] = newest_ids
    lens[:] = seq_lens
    positions[:] = lens - 1
    rows[:] = [req.req_pool_idx for req in batch.reqs]
    extend_lens[:] = 1
    starts[:] = range(bs)
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
    )
