"""Calls functions on a GPU from a check on the CPU, for runs of many seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.kernels.functions import (
    LocalFunction,
    Outcome,
    _watch,
    in_memory_of,
    memory_as_bytes,
    same_bytes,
    tensors_of,
)
from diptych.shared.tools.conformance.kernels.problem import Call
from diptych.shared.tools.conformance.kernels.watched_call import copied, flat

ALIGNMENT = 512
"""Of each storage, as torch's allocator has it."""


@contextmanager
def checking_on_cpu() -> Iterator[None]:
    """Inputs, expected results and comparisons are on the CPU, also where there is a GPU."""
    check_device.cache_clear()
    with patch.object(torch.cuda, "is_available", return_value=False):
        check_device()
    try:
        yield
    finally:
        check_device.cache_clear()


def gpu_works() -> bool:
    """False after an illegal memory access, after which every call fails."""
    try:
        return not torch.cuda.is_available() or float(torch.ones(1, device="cuda")) == 1.0
    except RuntimeError:
        return False


class FunctionOnGPU(LocalFunction):
    """Checks what `LocalFunction` does. Arguments on the CPU go to `device` in one transfer, and a call waits
    for it twice; with all tensors there it would wait for each of them in each step of the check."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        super().__init__(function)
        self.device = device
        self._starts: list[int] = []  # of the storages in `_memory`
        self._memory = torch.empty(0)

    def call(self, made: Call, is_same: bool = False) -> Outcome:
        """`is_same`: in the memory of the call before."""
        storages = {_key(each): memory_as_bytes(each) for _, each in tensors_of(made)}
        if self._held is None or not is_same:
            held = self._in_new_memory(made, storages)
            self._held = None  # after an error it is not in the memory
        else:
            held = in_memory_of(self._held, made)
        starts = dict(zip(storages, self._starts, strict=True))
        memory = self._memory
        memory.copy_(self._staged(starts, storages), non_blocking=True)
        before = memory.clone()
        returned, wrong = _watch().run(lambda: run_poisoned(lambda: self.function(*held.args, **held.kwargs)))
        early = copied(returned, wrong, [])  # when the current stream has come so far
        then = memory.clone() if made.written else before
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        changed = (then.view(torch.int64) != memory.view(torch.int64)).any()
        early, late, is_changed = self._fetched((early, copied(returned, [], []), changed))
        if (made.written and is_changed) or not all(map(_same, flat(early), flat(late))):
            wrong.append("returns while another stream still writes its result")
        modified = []
        for name, theirs in tensors_of(made) if made.written or is_changed else ():
            old = memory_as_bytes(theirs)
            place = slice(starts[_key(theirs)], starts[_key(theirs)] + len(old))
            if any(theirs is each for each in made.written):
                old.copy_(memory[place])
            elif not same_bytes(before[place], memory[place]):
                modified.append(name)
        self._held = held
        return Outcome(late, wrong, modified)

    def _staged(self, starts: dict[int, int], storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """All bytes of the memory. Those between two storages are NaN in every float type."""
        staged, end = self._on_cpu(self._memory.shape, torch.uint8), 0
        for key, each in storages.items():
            staged[end : starts[key]] = 0xFF
            end = starts[key] + len(each)
            staged[starts[key] : end] = each
        staged[end:] = 0xFF
        return staged

    def _in_new_memory(self, made: Call, storages: dict[int, torch.Tensor]) -> Call:
        sizes = [(len(each) // ALIGNMENT + 2) * ALIGNMENT for each in storages.values()]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        starts = dict(zip(storages, self._starts))

        def placed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(placed(each) for each in value)
            if not isinstance(value, torch.Tensor):
                return value
            offset = starts[_key(value)] // value.element_size() + value.storage_offset()
            empty = torch.empty(0, dtype=value.dtype, device=self.device)
            return empty.set_(self._memory.untyped_storage(), offset, value.shape, value.stride())

        return Call(placed(made.args), {name: placed(each) for name, each in made.kwargs.items()})

    def _on_cpu(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _fetched(self, value: Any) -> Any:
        """Copies on the CPU, after the work of the current stream."""

        def fetched(each: Any) -> Any:
            if isinstance(each, tuple):
                return tuple(fetched(part) for part in each)
            if not isinstance(each, torch.Tensor):
                return each
            if each.device.type != self.device.type:
                raise Mismatch("device of a result", self.device.type, each.device.type)
            return self._on_cpu(each.shape, each.dtype).copy_(each, non_blocking=True)

        found = fetched(value)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return found


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return True
    return same_bytes(*(each.reshape(-1).view(torch.uint8) for each in (a, b)))
