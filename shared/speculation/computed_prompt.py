"""Lets a drafter learn a prompt that another engine has computed, from the target's KV slots alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from diptych.shared.interfaces import Drafter, SchedulerParts
from diptych.shared.types import ForwardBatch, ForwardMode, Req

NUM_TOKENS = 2048
"""The most tokens of one pass of a draft model."""


def computed_chunks(req: Req, parts: SchedulerParts) -> Iterator[tuple[ForwardBatch, int]]:
    """The tokens behind the prefix that this engine had already, as steps that have computed them, each with
    the token that follows; -1: the first token of the answer."""
    prompt, device = req.origin_input_ids, parts.allocator.device
    assert req.req_pool_idx is not None
    for start in range(req.cache_protected_len, len(prompt), NUM_TOKENS):
        end = min(start + NUM_TOKENS, len(prompt))
        slots = parts.req_to_token_pool.read(req.req_pool_idx, start, end)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.tensor(prompt[start:end], device=device),
            positions=torch.arange(start, end, device=device),
            req_pool_indices=torch.tensor([req.req_pool_idx], device=device),
            seq_lens=torch.tensor([end], device=device),
            out_cache_loc=slots.to(device, torch.int64),
            extend_seq_lens=torch.tensor([end - start], device=device),
            extend_start_loc=torch.zeros(1, dtype=torch.int64, device=device),
            seq_lens_cpu=(end,),
            extend_seq_lens_cpu=(end - start,),
        )
        yield batch, prompt[end] if end < len(prompt) else -1


def learn_prompt(
    req: Req, first_token: int, chunks: Iterable[tuple[ForwardBatch, int]], drafter: Drafter
) -> None:
    """Call the drafter's `extend` for the prompt of a request whose KV has come from another engine."""
    for batch, next_token in chunks:
        ids = torch.tensor([first_token if next_token < 0 else next_token], device=batch.input_ids.device)
        drafter.extend([req], batch, None, ids)
