"""The disk tier: KV pages in files, one for each page, which outlive the engine.

Differs from reference: threads read and write, so no step of the scheduler waits for a disk, except for
`remove`, and when all pages are forgotten (a flush, a failed step, NaN). A page is written from its memory
and read into it, all layers in one system call. Reads do not queue behind writes. At most `MAX_QUEUED_BYTES`
wait to be written, and a page beyond is left out. Loses the queued pages when a process is killed, or is
another replica than the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from threading import Lock

from diptych.shared.interfaces import disk_tier as interface
from diptych.shared.interfaces.disk_tier import PageMemory
from diptych.shared.scheduling.page_files import PageFiles, digest_of

NUM_WRITERS, NUM_READERS = 2, 4
MAX_QUEUED_BYTES = 2**30
"""Of pages to be written."""

DIGEST_BYTES = len(digest_of("", []))
MAX_VIEWS = 1024
"""Buffers of one system call: IOV_MAX of Linux."""


class DiskTier(interface.DiskTier):
    def __init__(self, folder: str | Path, num_pages: int, page_num_bytes: int) -> None:
        self.files = PageFiles(folder, num_pages)
        self.page_num_bytes = page_num_bytes
        self._writers = ThreadPoolExecutor(NUM_WRITERS, "disk-writer")
        self._readers = ThreadPoolExecutor(NUM_READERS, "disk-reader")
        self._lock = Lock()
        self._num_queued = 0  # writes that have not ended

    def find(self, keys: Sequence[str]) -> Future[int]:
        return self._readers.submit(lambda: sum(1 for _ in takewhile(self.files.has, keys)))

    # --8<-- [start:disk-tier-operations]
    def write(self, key: str, memory: PageMemory) -> Future[bool]:
        with self._lock:
            is_full = (self._num_queued + 1) * self.page_num_bytes > MAX_QUEUED_BYTES
            if is_full and self._num_queued > 0:
                left_out: Future[bool] = Future()
                left_out.set_result(False)
                return left_out
            self._num_queued += 1
        future = self._writers.submit(self._write, key, memory)
        future.add_done_callback(self._has_ended)  # or is cancelled
        return future

    def read(self, key: str, memory: PageMemory) -> Future[bool]:
        return self._readers.submit(self._read, key, memory)

    # --8<-- [end:disk-tier-operations]

    def remove(self, key: str) -> None:
        self.files.remove(key)

    def _has_ended(self, _: Future[bool]) -> None:
        with self._lock:
            self._num_queued -= 1

    def _write(self, key: str, memory: PageMemory) -> bool:
        memory.wait()
        views = [*memory.views, memoryview(digest_of(key, memory.views))]
        try:
            with self.files.new_file(key) as file:
                _all_bytes(os.writev, file.fileno(), views)
        except OSError:
            return False
        return True

    def _read(self, key: str, memory: PageMemory) -> bool:
        memory.wait()
        digest = bytearray(DIGEST_BYTES)
        try:
            file = os.open(self.files.path(key), os.O_RDONLY)
            try:
                is_whole = os.fstat(file).st_size == self.page_num_bytes + DIGEST_BYTES
                is_whole = is_whole and _all_bytes(os.readv, file, [*memory.views, memoryview(digest)])
            finally:
                os.close(file)
        except OSError:
            return False
        if not is_whole or digest != digest_of(key, memory.views):
            self.files.remove(key)
            return False
        self.files.use(key)
        return True


def _all_bytes(call: Callable[[int, Sequence[memoryview]], int], file: int, views: list[memoryview]) -> bool:
    """Read or write all bytes of the views; a call may stop before. False: the file has ended."""
    first = 0
    while first < len(views):
        num_bytes = call(file, views[first : first + MAX_VIEWS])
        if num_bytes == 0:
            return False
        while first < len(views) and num_bytes >= len(views[first]):
            num_bytes -= len(views[first])
            first += 1
        if num_bytes:
            views[first] = views[first][num_bytes:]
    return True
