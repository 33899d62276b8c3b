"""The ForwardBatch that describes a step's tokens.

Differs from reference: nothing waits for the device. A batch's numbers go over in one copy; a token that is
not known yet is named by its place in the FutureMap (optimized/future_map.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from shared.input_logprobs import input_logprob_rows
from shared.to_device import copy_to_device, vectors_to_device
from shared.types import ForwardBatch, Req, ScheduleBatch


def name_tokens(
    batch: ScheduleBatch, place_of: Callable[[Req], int | None], device: torch.device
) -> ForwardBatch:
    """The batch as tensors; input ids below zero are places in the FutureMap. Call it once memory is
    allocated and before any result is processed."""
    assert batch.out_cache_loc is not None
    num_extend = batch.batch_size - batch.num_decode_reqs
    extending, decoding = batch.reqs[:num_extend], batch.reqs[num_extend:]

    input_ids: list[int] = []
    for req in extending:
        input_ids += req.fill_ids[len(req.prefix_indices) :]
    for req in decoding:
        place = place_of(req)
        input_ids.append(req.output_ids[-1] if place is None else -place)
    seq_lens = [req.kv_committed_len for req in batch.reqs]
    extend_seq_lens = [req.extend_input_len for req in extending] + [1] * len(decoding)
    start_locs = [0, *accumulate(extend_seq_lens)][:-1]
    logprob_rows, logprob_ids = input_logprob_rows(extending, start_locs)
    ids, rows, lens, extend_lens, starts, *wanted = vectors_to_device(
        [
            input_ids,
            [req.req_pool_idx for req in batch.reqs],
            seq_lens,
            extend_seq_lens,
            start_locs,
            logprob_rows,
            logprob_ids,
        ],
        device,
    )
    if extending:
        before = starts - (lens - extend_lens)  # row of the batch minus position
        num_tokens = len(input_ids)
        positions = torch.arange(num_tokens, device=device)
        positions = positions - before.repeat_interleave(extend_lens, output_size=num_tokens)
    else:
        positions = lens - 1
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
    )
