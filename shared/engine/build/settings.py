"""The device and the panel of an engine whose configuration names none."""

from __future__ import annotations

import torch


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def default_panel(device: str) -> str:
    return "optimized" if device.startswith("cuda") else "reference"
