"""The ForwardBatch that describes a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from diptych.reference.modes.select_embeds import embeds_of_step
from diptych.shared.sampling.logprobs import input_logprob_rows
from diptych.shared.types import ForwardBatch, Req, ScheduleBatch


def make_forward_batch(
    batch: ScheduleBatch, newest_ids: Sequence[int], num_token_ids: int, device: torch.device
) -> ForwardBatch:
    """The batch as tensors. newest_ids: the input of each request that decodes. Call it once memory is
    allocated and before any result is processed."""
    assert batch.out_cache_loc is not None
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
    embed_rows, embeds = None, None
    if any(req.embeds is not None for req in extending):
        embed_rows, embeds = embeds_of_step(extending, start_locs, device)
    custom_mask = None
    if any(req.diffusion is not None for req in extending):
        custom_mask = visible_in_blocks(batch.reqs, seq_lens, extend_seq_lens, device)
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        input_ids=tensor(input_ids),
        positions=positions,
        req_pool_indices=tensor([req.req_pool_idx for req in batch.reqs]),
        seq_lens=tensor(seq_lens),
        out_cache_loc=batch.out_cache_loc.to(device),
        extend_seq_lens=tensor(extend_seq_lens),
        extend_start_loc=tensor(start_locs),
        seq_lens_cpu=tuple(seq_lens),
        extend_seq_lens_cpu=tuple(extend_seq_lens),
        input_logprob_rows=tensor(rows) if rows else None,
        input_logprob_ids=tensor(ids) if rows else None,
        num_top_input_logprobs=max((req.sampling_params.top_logprobs_num for req in extending), default=0),
        num_token_ids=num_token_ids,
        embed_rows=embed_rows,
        embeds=embeds,
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
