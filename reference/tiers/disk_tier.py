"""The disk tier: KV pages in files, one for each page, which outlive the engine."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections import OrderedDict
from pathlib import Path


class DiskTier:
    """Up to `num_pages` pages in a folder; a file's name is the page's key. Engines may share it."""

    def __init__(self, folder: str | Path, num_pages: int, page_num_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.num_pages = num_pages
        self.page_num_bytes = page_num_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        found = sorted(self.folder.glob("*.kv"), key=lambda path: path.stat().st_mtime)
        self._used: OrderedDict[str, None] = OrderedDict((path.stem, None) for path in found)  # oldest first

    def write(self, key: str, data: bytes) -> None:
        """Write a page. A file gets its name only when it is complete. What a disk does not take is left out:
        the page is a copy."""
        unfinished = self.folder / f"{key}.{secrets.token_hex(4)}"
        try:
            unfinished.write_bytes(data)
            unfinished.replace(self._path(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            message = f"{self.folder}: KV pages are not written: {error.strerror}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        self._used[key] = None
        self._used.move_to_end(key)
        while len(self._used) > self.num_pages:
            self.remove(next(iter(self._used)))

    def remove(self, key: str) -> None:
        self._used.pop(key, None)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def read(self, key: str) -> bytes | None:
        """Read a page; None if it does not exist or has another size."""
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return None
        if len(data) != self.page_num_bytes:
            return None
        self._used[key] = None
        self._used.move_to_end(key)
        return data

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.kv"
