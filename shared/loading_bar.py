"""A progress bar for weights that take a while."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

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
