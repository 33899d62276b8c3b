"""A model on its device with its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from shared.config import EngineConfig, ModelConfig
from shared.interfaces import CausalLM
from shared.loading.weights import dummy_weights, iterate_weights


def load_model(
    folder: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    component: Callable[[str], Any],
    device: torch.device,
    dtype: torch.dtype,
) -> CausalLM:
    """Build a folder's model from the chosen components and load it. Its files are checked before the model
    takes memory."""
    if config.load_format == "dummy":
        weights = dummy_weights(model_config, config.random_seed, device)
    else:
        weights = iterate_weights(folder, model_config, LoadingBar().update)
    with building(device, dtype):
        model_class = component("models").model_class(model_config.architecture)
        model: CausalLM = model_class(model_config, component("layers"), component("moe"))
    model.load_weights(weights)
    return model.eval()


@contextlib.contextmanager
def building(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New parameters go to this device and have this dtype; both settings are undone afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


MIN_BYTES = 500_000_000
"""A smaller checkpoint is loaded before anybody would read the bar."""


class LoadingBar:
    """`update` fits `iterate_weights(on_progress=...)`."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def update(self, num_bytes_read: int, num_bytes: int) -> None:
        if num_bytes < MIN_BYTES:
            return
        if self._bar is None:
            self._bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc="load weights", leave=False)
        self._bar.update(num_bytes_read - self._bar.n)
        if num_bytes_read == num_bytes:
            self._bar.close()
