"""The disk tier: KV pages in files, one for each page, which outlive the engine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import warnings
from collections import OrderedDict
from pathlib import Path


def digest_of(key: str, data: bytes) -> bytes:
    """Ends the file of a page: a page of another key, or one that a disk has damaged, has another."""
    return hashlib.sha256(key.encode() + data).digest()


class DiskTier:
    """Up to `num_pages` pages in a folder; a file's name is the page's key, and its end a digest of both.
    Engines may share it. KV tells what prompts said: folder and files are open to their owner only."""

    def __init__(self, folder: str | Path, num_pages: int, page_num_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.num_pages = num_pages
        self.page_num_bytes = page_num_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(stat.S_IRWXU)
        found = sorted(self.folder.glob("*.kv"), key=lambda path: path.stat().st_mtime)
        self._used: OrderedDict[str, None] = OrderedDict((path.stem, None) for path in found)  # oldest first

    def write(self, key: str, data: bytes) -> None:
        """Write a page. A file gets its name only when it is complete. What a disk does not take is left out:
        the page is a copy."""
        unfinished = self.folder / f"{key}.{secrets.token_hex(4)}"
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data + digest_of(key, data))
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
        """Read a page; None if it does not exist or is damaged."""
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return None
        data, digest = data[: self.page_num_bytes], data[self.page_num_bytes :]
        if digest != digest_of(key, data):
            self.remove(key)
            return None
        self._used[key] = None
        self._used.move_to_end(key)
        return data

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.kv"
