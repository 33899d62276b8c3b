"""Fills memory that must not be read before it is written with values that expose such a read."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

INT_POISON = -7919
"""No token, expert, slot or position: as an index it is out of every range, from both ends."""


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite with NaN, or with `INT_POISON`; returns the tensor."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else INT_POISON)


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    return poison_(torch.empty(tuple(shape), dtype=dtype, device=device))


def amid_poison(tensor: torch.Tensor, margin: int = 3) -> torch.Tensor:
    """The same values as a view into a larger tensor of poison: rows before and after it, and columns beside
    it, so that it is contiguous in its last dimension only. Kernels that assume a dense layout, or read past
    an end, find NaN."""
    sizes = [
        size + 2 * margin if dim in (0, tensor.dim() - 1) else size for dim, size in enumerate(tensor.shape)
    ]
    view = poisoned(sizes, tensor.dtype, tensor.device)
    for dim in {0, tensor.dim() - 1}:
        view = view.narrow(dim, margin, tensor.shape[dim])
    return view.copy_(tensor)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy with poison before and after it: `memory_of` finds writes outside of it. The margin keeps
    an alignment of 64 bytes or more."""
    return amid_poison(tensor.flatten(), margin=64).view(tensor.shape)


def memory_of(tensor: torch.Tensor, *, without_it: bool = False) -> torch.Tensor:
    """A copy of the bytes of the whole storage of a tensor: uint8 [elements, itemsize]. `without_it`: without
    the tensor's own elements."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    rows = whole.view(torch.uint8).view(-1, tensor.element_size())
    if not without_it:
        return rows.clone()
    is_outside = torch.ones(len(rows), dtype=torch.bool, device=tensor.device)
    is_outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return rows[is_outside]


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within the block, torch.empty and similar functions return NaN or the largest integer, which exposes
    elements that an implementation does not write."""
    mode = torch.get_deterministic_debug_mode()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations without a deterministic variant: they may run
        torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` imports a compiler
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fills
            torch.set_deterministic_debug_mode(mode)


def run_poisoned(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) as an engine calls it, without gradients, amid poisoned allocations."""
    with torch.inference_mode(), poisoned_allocations():
        return function(*args)
