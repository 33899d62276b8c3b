"""Sums over ranks, right and with one mistake each. The processes of the test import this file."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import distributed

KEPT: dict[str, Any] = {}


def parts_of(x: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, x.contiguous(), group=group)
    return parts


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def in_place(x: torch.Tensor, group: Any) -> None:
    x.copy_(added(parts_of(x, group)))


def functional(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    assert op == "sum"
    return added(parts_of(x, group))


def default_group(x: torch.Tensor) -> torch.Tensor:
    return added(parts_of(x))


def own_first(x: torch.Tensor, group: Any) -> None:
    parts = parts_of(x, group)
    x.copy_(added([parts.pop(distributed.get_rank()), *parts]))


def order_of_arrival(x: torch.Tensor, group: Any) -> None:
    """Rank 0 adds what comes, and gives the sum to the others. Ranks 1 and 2 are late in turns."""
    KEPT["calls"] = KEPT.get("calls", 0) + 1
    if distributed.get_rank() == 1 + KEPT["calls"] % 2:
        time.sleep(0.02)
    if distributed.get_rank() == 0:
        parts, received = [x.clone()], torch.empty(x.shape, dtype=x.dtype)
        for _ in range(distributed.get_world_size() - 1):
            distributed.recv(received)
            parts.append(received.clone())
        x.copy_(added(parts))
    else:
        distributed.send(x.contiguous(), 0)
    distributed.broadcast(x, 0)


def without_the_last(x: torch.Tensor, group: Any) -> None:
    x.copy_(added(parts_of(x, group)[:-1]))


def stale(x: torch.Tensor, group: Any) -> None:
    total = added(parts_of(x, group))
    x.copy_(KEPT.get(x.shape, total))
    KEPT[x.shape] = total


def stale_peers(x: torch.Tensor, group: Any) -> None:
    """The buffers of the others are read before they have written them."""
    parts, rank = parts_of(x, group), distributed.get_rank()
    before = KEPT.get("parts", parts)
    before = before if before[0].shape == x.shape else parts
    KEPT["parts"] = parts
    x.copy_(added([part if r == rank else old for r, (part, old) in enumerate(zip(parts, before))]))


def reused_buffer(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    out = KEPT.setdefault((x.shape, x.dtype), torch.empty_like(x))
    return out.copy_(added(parts_of(x, group)))


def input_modified(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    in_place(x, group)
    return x.clone()


def last_bit(x: torch.Tensor, group: Any) -> None:
    in_place(x, group)
    if distributed.get_rank() == 1:
        x.view(torch.int32)[..., 0] ^= 1


def only_rank_0(x: torch.Tensor, group: Any) -> None:
    total = added(parts_of(x, group))
    if distributed.get_rank() == 0:
        x.copy_(total)


def mean(x: torch.Tensor, group: Any) -> None:
    in_place(x, group)
    x /= distributed.get_world_size()


def one_element_beyond(x: torch.Tensor, group: Any) -> None:
    in_place(x, group)
    torch.as_strided(x, (x.numel() + 1,), (1,), x.storage_offset())[-1] = 0


def dense_memory(x: torch.Tensor, group: Any) -> None:
    """Takes the memory behind the first element for the whole tensor."""
    in_place(torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()), group)


def asserts_dense(x: torch.Tensor, group: Any) -> None:
    assert x.is_contiguous(), "x must be contiguous"
    in_place(x, group)


def refuses_slices(x: torch.Tensor, group: Any) -> None:
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    in_place(x, group)


def one_refuses(x: torch.Tensor, group: Any) -> None:
    if distributed.get_rank() == 1:
        raise ValueError("not on this rank")
    in_place(x, group)


def one_raises(x: torch.Tensor, group: Any) -> None:
    in_place(x, group)
    if distributed.get_rank() == 2:
        raise KeyError("lost")


def one_ends(x: torch.Tensor, group: Any) -> None:
    if distributed.get_rank() == 1:
        os._exit(3)
    in_place(x, group)


def one_hangs(x: torch.Tensor, group: Any) -> None:
    if distributed.get_rank() == 1:
        time.sleep(60)
    in_place(x, group)


def returns_nothing(x: torch.Tensor) -> None:
    default_group(x)


def float32_result(x: torch.Tensor) -> torch.Tensor:
    return default_group(x).float()
