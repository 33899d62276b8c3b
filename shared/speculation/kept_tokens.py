"""What a verification keeps, as the extension that the drafter gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from diptych.shared.to_device import vectors_to_device
from diptych.shared.types import ForwardBatch, ForwardMode


def kept_tokens(
    verified: ForwardBatch,
    tokens: Sequence[int],
    lens: Sequence[int],
    seq_lens: Sequence[int],
    requests: Sequence[int] | None = None,
    out_cache_loc: torch.Tensor | None = None,
) -> tuple[ForwardBatch, torch.Tensor]:
    """An EXTEND batch of some tokens of `verified`, and int64 indices of these tokens on its device.

    tokens: indices into the tokens of `verified`, request by request. lens: how many are of each request.
    seq_lens: tokens with KV of each, these included. requests: which of `verified` they are (default: all).
    out_cache_loc: the slots in which the KV stays (default: those in which it was computed)."""
    device = verified.input_ids.device
    which, rows, extend_lens, starts, ends = vectors_to_device(
        [
            list(range(len(lens)) if requests is None else requests),
            list(tokens),
            list(lens),
            [0, *accumulate(lens)][:-1],
            list(seq_lens),
        ],
        device,
    )
    kept = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=verified.input_ids[rows],
        positions=verified.positions[rows],
        req_pool_indices=verified.req_pool_indices[which],
        seq_lens=ends,
        out_cache_loc=verified.out_cache_loc[rows] if out_cache_loc is None else out_cache_loc,
        extend_seq_lens=extend_lens,
        extend_start_loc=starts,
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=tuple(lens),
    )
    return kept, rows
