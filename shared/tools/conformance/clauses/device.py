"""The device that clauses run on: a CUDA GPU if there is one, so that GPU implementations are checked too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch

from diptych.shared.loading import load_model


@cache
def check_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def building(dtype: torch.dtype, device: str | None = None) -> AbstractContextManager[None]:
    """A context in which modules are made as in an engine; the device defaults to the one under check."""
    return load_model.building(dtype, device or check_device())
