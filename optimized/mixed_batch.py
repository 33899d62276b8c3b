"""The two halves of a mixed batch: prompts, and behind them requests that decode."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from diptych.shared.types import ForwardBatch, ForwardMode


def num_decoding(batch: ForwardBatch) -> int:
    """The number of last requests of a mixed batch with one new token each, which run as decoding
    requests."""
    return sum(1 for _ in takewhile(lambda n: n == 1, reversed(batch.extend_seq_lens_cpu)))


def split_mixed(batch: ForwardBatch, num_decoding: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Split a mixed batch: the last requests, of one new token each, as a decode batch, and the requests
    before them.

    The decode batch gets copies, because its kernels are compiled for aligned tensors, and slices may be
    unaligned."""
    bs, n = batch.batch_size - num_decoding, batch.num_tokens - num_decoding
    kinds = (ForwardMode.EXTEND, slice(bs), slice(n)), (ForwardMode.DECODE, slice(bs, None), slice(n, None))
    prompts, decoding = (
        ForwardBatch(
            forward_mode=mode,
            input_ids=batch.input_ids[tokens],
            positions=batch.positions[tokens],
            req_pool_indices=batch.req_pool_indices[requests],
            seq_lens=batch.seq_lens[requests],
            out_cache_loc=batch.out_cache_loc[tokens],
            extend_seq_lens=batch.extend_seq_lens[requests],
            extend_start_loc=batch.extend_start_loc[requests],
            seq_lens_cpu=batch.seq_lens_cpu[requests],
            extend_seq_lens_cpu=batch.extend_seq_lens_cpu[requests],
        )
        for mode, requests, tokens in kinds
    )
    return prompts, replace(
        decoding,
        req_pool_indices=decoding.req_pool_indices.clone(),
        seq_lens=decoding.seq_lens.clone(),
        extend_start_loc=decoding.extend_start_loc - n,
    )
