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

ROW, START, NUM_KEPT, IS_FIRST, FIRST_STORE, LAST_STORE, FIRST_CHUNK, LAST_CHUNK, NUM_FIELDS = (
    tl.constexpr(i) for i in range(9)
)
"""Fields of a request: its row in the pool, the number of its first token in the batch, how many of its
tokens stay in the row, whether none came before. Its stores and chunks are those from the first to the last,
without the last."""


class Tokens(NamedTuple):
    """The new tokens of a request; as in `StatePool.begin`."""

    row: int
    start: int  # position of its first new token
    end: int
    stores: Sequence[tuple[int, int]]  # (new tokens before the copy, checkpoint)


class LayerRows(NamedTuple):
    """The rows of the pool in one layer."""

    inputs: torch.Tensor  # [rows, taps - 1, num_channels]
    states: torch.Tensor  # [rows, num_v_heads, k_head_dim, v_head_dim]
    held_inputs: torch.Tensor  # [rows, nodes, num_channels]
    held_gates: torch.Tensor  # [rows, nodes, num_v_heads * (num_decays + 1)]: g of all heads, then beta


class LinearSteps(NamedTuple):
    """Tensors of int64, each aligned to 16 bytes, and of one number at least."""

    num_requests: int
    num_single: int  # requests of one token, or of the nodes of a verify step; the others come in chunks
    num_chunks: int
    num_nodes: int  # of each request in a verify step; 0: it is another one
    single: torch.Tensor  # numbers of the requests that go token by token
    long: torch.Tensor  # and of the others
    request_of: torch.Tensor  # [num_tokens]
    requests: torch.Tensor  # [num_requests * NUM_FIELDS]
    stores: torch.Tensor  # (new tokens of the request before the copy, checkpoint), one after the other
    chunks: torch.Tensor  # (first token in the batch, number of tokens, checkpoint after them or 0)
    accepted: torch.Tensor  # [num_requests]: held nodes before the first token; read if the pool holds nodes


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
    accepted = torch.zeros(len(reqs), dtype=torch.int64, device=device)
    return LinearSteps(len(reqs), len(single), len(chunks) // 3, 0, *tables, accepted=accepted)


PADDING = Tokens(0, 0, 1, ())
"""A request of one token in row 0."""
MAX_STORES = 2
"""Of a decode step and request, on average."""


def decode_tables(num_requests: int, device: torch.device) -> LinearSteps:
    """Tables at fixed addresses for decode steps of so many requests: padding, until `load_tables`."""
    padding = make_steps([PADDING] * num_requests, device)
    stores = torch.zeros(2 * MAX_STORES * num_requests, dtype=torch.int64, device=device)
    return padding._replace(stores=stores)


def verify_tables(num_requests: int, num_nodes: int, device: torch.device) -> LinearSteps:
    """As `decode_tables`, for so many nodes of each request. Their rows come from the device: `load_rows`."""
    padding = make_steps([PADDING] * num_requests, device)
    requests = padding.requests.view(num_requests, -1)
    requests[:, START.value] *= num_nodes
    requests[:, [NUM_KEPT.value, IS_FIRST.value]] = 0
    return padding._replace(num_nodes=num_nodes, request_of=padding.request_of.repeat_interleave(num_nodes))


def load_rows(tables: LinearSteps, rows: torch.Tensor) -> None:
    """Bring `verify_tables` up to date; behind these requests is padding."""
    in_tables = tables.requests.view(tables.num_requests, -1)[:, ROW.value]
    in_tables[: len(rows)] = rows
    in_tables[len(rows) :] = PADDING.row


def load_tables(tables: LinearSteps, reqs: Sequence[Tokens]) -> None:
    """Bring `decode_tables` up to date; behind these requests is padding."""
    padding = [PADDING] * (tables.num_requests - len(reqs))
    steps = make_steps([*reqs, *padding], tables.requests.device)
    assert steps.num_single == tables.num_requests, "a request of a decode step has one token"
    num_stores = len(steps.stores)
    assert num_stores <= len(tables.stores), f"{num_stores // 2} stores of {len(reqs)} requests in a step"
    torch._foreach_copy_([tables.requests, tables.stores[:num_stores]], [steps.requests, steps.stores])
