"""Where clauses run: on a CUDA GPU if there is one, so that GPU implementations meet the same contract."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import torch


@cache
def check_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def building(dtype: torch.dtype, device: str | None = None) -> Iterator[None]:
    """Modules made here have parameters of this dtype on this device (default: the one under check), as an
    engine makes them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device or check_device()):
            yield
    finally:
        torch.set_default_dtype(before)
