"""Rows of images, kept by content: an image that comes again does not run through the vision tower."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

MAX_BYTES = 256 * 2**20
"""Of the kept rows, on the tower's device."""


class TowerRows:
    """A table of digests of images and their rows. The least recently used ones go when it is full."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._rows: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()  # requests are prepared in the threads of their callers

    # --8<-- [start:tower-rows]
    def rows_of(
        self, digests: Sequence[bytes], images: Sequence[torch.Tensor], tower: Any
    ) -> list[torch.Tensor]:
        """The rows [num_tokens, k * text_hidden_size] of each image. `tower` runs once,
        over the images that are not in the table."""
        with self._lock:
            found = {d: self._rows[d] for d in digests if d in self._rows}
        new = {d: image for d, image in zip(digests, images) if d not in found}
        if new:
            found |= zip(new, tower(list(new.values())))
        with self._lock:
            for digest in dict.fromkeys(digests):
                self._keep(digest, found[digest])
        return [found[digest] for digest in digests]

    # --8<-- [end:tower-rows]

    def _keep(self, digest: bytes, rows: torch.Tensor) -> None:
        if rows.nbytes > self.max_bytes:
            return  # all others would go
        if digest not in self._rows:
            rows = rows.clone()  # else it would keep the rows of all images of the call
            self._rows[digest] = rows
            self.num_bytes += rows.nbytes
        self._rows.move_to_end(digest)
        while self.num_bytes > self.max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.num_bytes -= oldest.nbytes
