"""The disk tier: KV pages in files, one for each page, which outlive the engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from diptych.shared.interfaces import disk_tier as interface
from diptych.shared.interfaces.disk_tier import PageMemory
from diptych.shared.scheduling.page_files import PageFiles, digest_of

Result = TypeVar("Result")


class DiskTier(interface.DiskTier):
    def __init__(self, folder: str | Path, num_pages: int, page_num_bytes: int) -> None:
        self.files = PageFiles(folder, num_pages)
        self.page_num_bytes = page_num_bytes

    def find(self, keys: Sequence[str]) -> Future[int]:
        return done(sum(1 for _ in takewhile(self.files.has, keys)))

    # --8<-- [start:disk-tier-operations]
    def write(self, key: str, memory: PageMemory) -> Future[bool]:
        memory.wait()
        data = b"".join(memory.views)
        try:
            with self.files.new_file(key) as file:
                file.write(data + digest_of(key, [data]))
        except OSError:
            return done(False)
        return done(True)

    def read(self, key: str, memory: PageMemory) -> Future[bool]:
        try:
            found = self.files.path(key).read_bytes()
        except OSError:
            return done(False)
        data = found[: self.page_num_bytes]
        if found != data + digest_of(key, [data]):
            self.files.remove(key)
            return done(False)
        memory.wait()
        put(data, memory.views)
        self.files.use(key)
        return done(True)

    # --8<-- [end:disk-tier-operations]

    def remove(self, key: str) -> None:
        self.files.remove(key)


def done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def put(data: bytes, views: Sequence[memoryview]) -> None:
    start = 0
    for view in views:
        view[:] = data[start : start + len(view)]
        start += len(view)
