"""What the kernels of linear attention know of a step: tables of integers, made once and copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import triton.language as tl

from diptych.shared.to_device import vectors_to_device

CHUNK = 64
"""Positions of a chunk. Chunks end at its multiples, however a prompt is divided into steps."""

ROW, START, NUM_TOKENS, IS_FIRST, FIRST_STORE, LAST_STORE, FIRST_CHUNK, LAST_CHUNK, NUM_FIELDS = (
    tl.constexpr(i) for i in range(9)
)
"""Fields of a request: its row in the pool, the number of its first token in the batch, how many it has,
whether none came before. Its stores and chunks are those from the first to the last, without the last."""


class Tokens(NamedTuple):
    """The new tokens of a request; as in `StatePool.begin`."""

    row: int
    start: int  # position of its first new token
    end: int
    stores: Sequence[tuple[int, int]]  # (new tokens before the copy, checkpoint)


class LinearSteps(NamedTuple):
    """Tensors of int64, each aligned to 16 bytes, and of one number at least."""

    num_requests: int
    num_single: int  # requests of one token; the others are computed in chunks
    num_chunks: int
    single: torch.Tensor  # numbers of the requests of one token
    long: torch.Tensor  # and of the others
    request_of: torch.Tensor  # [num_tokens]
    requests: torch.Tensor  # [num_requests * NUM_FIELDS]
    stores: torch.Tensor  # (new tokens of the request before the copy, checkpoint), one after the other
    chunks: torch.Tensor  # (first token in the batch, number of tokens, checkpoint after them or 0)


def make_steps(reqs: Sequence[Tokens], device: torch.device) -> LinearSteps:
    request_of: list[int] = []
    requests: list[int] = []
    stores: list[int] = []
    chunks: list[int] = []
    single, long = [], []
    for i, (row, start, end, copies) in enumerate(reqs):
        num_tokens, first_token = end - start, len(request_of)
        requests += [
            row,
            first_token,
            num_tokens,
            int(start == 0),
            len(stores) // 2,
            len(stores) // 2 + len(copies),
        ]
        requests.append(len(chunks) // 3)
        for copy in copies:
            stores += copy
        if num_tokens == 1:
            single.append(i)
        else:
            long.append(i)
            after = {start + n: checkpoint for n, checkpoint in copies}
            borders = {start, end, *after, *range(start // CHUNK * CHUNK + CHUNK, end, CHUNK)}
            for left, right in pairwise(sorted(borders)):
                chunks += [first_token + left - start, right - left, after.get(right, 0)]
        requests.append(len(chunks) // 3)
        request_of += [i] * num_tokens
    vectors = [single, long, request_of, requests, stores, chunks]
    tables = vectors_to_device([vector or [0] for vector in vectors], device)
    return LinearSteps(len(reqs), len(single), len(chunks) // 3, *tables)


PADDING = Tokens(0, 0, 1, ())
"""A request of one token in row 0."""
MAX_STORES = 2
"""Of a decode step and request, on average."""


def decode_tables(num_requests: int, device: torch.device) -> LinearSteps:
    """Tables at fixed addresses for decode steps of so many requests: padding, until `load_tables`."""
    padding = make_steps([PADDING] * num_requests, device)
    stores = torch.zeros(2 * MAX_STORES * num_requests, dtype=torch.int64, device=device)
    return padding._replace(stores=stores)


def load_tables(tables: LinearSteps, reqs: Sequence[Tokens]) -> None:
    """Bring `decode_tables` up to date; behind these requests is padding."""
    padding = [PADDING] * (tables.num_requests - len(reqs))
    steps = make_steps([*reqs, *padding], tables.requests.device)
    assert steps.num_single == tables.num_requests, "a request of a decode step has one token"
    num_stores = len(steps.stores)
    assert num_stores <= len(tables.stores), f"{num_stores // 2} stores of {len(reqs)} requests in a step"
    torch._foreach_copy_([tables.requests, tables.stores[:num_stores]], [steps.requests, steps.stores])
