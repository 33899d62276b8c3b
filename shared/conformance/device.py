"""Where clauses run: on a CUDA GPU if there is one, so that GPU implementations meet the same contract."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch

from shared.loading import load_model


@cache
def check_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def building(dtype: torch.dtype, device: str | None = None) -> AbstractContextManager[None]:
    """As an engine makes modules; the device defaults to the one under check."""
    return load_model.building(dtype, device or check_device())
