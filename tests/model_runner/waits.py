"""Finds synchronization without a GPU: ops whose result, or its size, the CPU needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
)


class Waited(AssertionError):
    """Says which op it was; the traceback says where."""


class _RefusingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS or (name.startswith("index") and _has_mask(args)):
            raise Waited(f"{name}: a GPU would have to finish first")
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            raise Waited("repeat_interleave without output_size: the CPU needs the sum")
        return func(*args, **(kwargs or {}))


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


@contextmanager
def refusing_to_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def tolist(tensor: torch.Tensor) -> Any:
        raise Waited(f"tolist of {tuple(tensor.shape)}")

    with monkeypatch.context() as patch, _RefusingMode():
        patch.setattr(torch.Tensor, "tolist", tolist)  # on a CPU it dispatches nothing
        yield
