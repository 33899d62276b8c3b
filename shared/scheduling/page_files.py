"""The files of a disk tier: names, the order of use, and the digest at the end of each file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import BinaryIO

STALE_SECONDS = 3600.0
"""Age of an unfinished file that no process writes any more."""
_PAGE = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}")


def digest_of(key: str, views: Sequence[bytes | memoryview]) -> bytes:
    """Ends the file of a page: a page of another key, or one that a disk has damaged, has another."""
    digest = hashlib.sha256(key.encode())
    for view in views:
        digest.update(view)
    return digest.digest()


class PageFiles:
    """The files of up to `num_pages` pages; a file's name is the page's key, a SHA-256 in hex. Files of other
    names stay as they are. Any thread may call."""

    def __init__(self, folder: str | Path, num_pages: int) -> None:
        self.folder = Path(folder).expanduser()
        self.num_pages = num_pages
        self.folder.mkdir(stat.S_IRWXU, parents=True, exist_ok=True)
        times: dict[Path, float] = {}
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another engine has removed it
                written = path.stat().st_mtime
                if _PAGE.fullmatch(path.name):
                    times[path] = written
                elif _UNFINISHED.fullmatch(path.name) and written < time.time() - STALE_SECONDS:
                    path.unlink()  # a process ended while it wrote
        found = sorted(times, key=lambda path: times[path])
        self._lock = Lock()
        self._used: OrderedDict[str, None] = OrderedDict((path.stem, None) for path in found)  # oldest first

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.kv"

    def has(self, key: str) -> bool:
        try:
            return self.path(key).exists()
        except OSError:  # a disk that fails
            return False

    @contextlib.contextmanager
    def new_file(self, key: str) -> Iterator[BinaryIO]:
        """A file to write a page to. The file gets its name when it is complete; an `OSError` leaves no
        file, and is reported as a warning and raised again."""
        unfinished = self.folder / f"{key}.{secrets.token_hex(4)}"
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                yield file
            unfinished.replace(self.path(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            message = f"{self.folder}: KV pages are not written: {error.strerror}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            raise
        self.use(key)
        self._leave()

    def use(self, key: str) -> None:
        with self._lock:
            self._used[key] = None
            self._used.move_to_end(key)

    def _leave(self) -> None:
        """Remove the least recently used pages that are too many."""
        with self._lock:
            num_leaving = len(self._used) - self.num_pages
            leaving = [self._used.popitem(last=False)[0] for _ in range(num_leaving)]
        for key in leaving:
            self.remove(key)

    def remove(self, key: str) -> None:
        with self._lock:
            self._used.pop(key, None)
        with contextlib.suppress(OSError):
            self.path(key).unlink()
