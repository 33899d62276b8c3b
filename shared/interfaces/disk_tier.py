"""Contract of a disk tier: KV pages in files, which outlive the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple


class PageMemory(NamedTuple):
    """A page in CPU memory."""

    views: Sequence[memoryview]  # of bytes, one behind the other; a read writes to them
    wait: Callable[[], None]  # returns when no other copy uses the views; called in any thread


class DiskTier(ABC):
    """Up to `num_pages` pages of `page_num_bytes` bytes in the files of a folder. When there are more, the
    least recently used leave. Engines may share a folder. A key is a SHA-256 in hex; files that are no pages
    stay. Pages contain information about prompts, so files, and a folder that is made, are open to their
    owner only.

    A page is a copy, so a disk that fails raises no error: the page is not found. A process that ends in the
    middle leaves no file under a page's name that is not whole.

    Operations run now, or in other threads: a future has the result. The memory of a page belongs to the tier
    until its future is done or cancelled. Operations of one key may overtake each other.
    """

    @abstractmethod
    def __init__(self, folder: str | Path, num_pages: int, page_num_bytes: int) -> None: ...

    @abstractmethod
    def find(self, keys: Sequence[str]) -> Future[int]:
        """How many of these pages exist, up to the first that does not."""

    @abstractmethod
    def write(self, key: str, memory: PageMemory) -> Future[bool]:
        """Write a page. False: it is left out, because the disk does not take it, or too many are queued."""

    @abstractmethod
    def read(self, key: str, memory: PageMemory) -> Future[bool]:
        """Read a page. False: it does not exist or is damaged, and the memory has any contents. A damaged
        page is removed."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a page, before the call returns. No operation of the key may be pending."""
