"""Triton's files on disk, for processes that compile the same kernels at the same time.

Triton writes the launcher of a kernel again if another process has just written it. CPython knows a loaded
module by the number of its file, which it reads before it loads the file by its name. Was the file replaced
in between, then it keeps a number that the file system soon gives to another launcher, and takes that one for
the first: "function takes exactly 31 arguments (37 given)". So here the first file stays.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from triton.runtime.cache import FileCacheManager


class FirstFileStays(FileCacheManager):
    """Triton's cache manager, except that a module is replaced only by one with other bytes."""

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        if not isinstance(data, bytes) or not filename.endswith(".so"):
            path: str = super().put(data, filename, binary)
            return path
        path = self._make_path(filename)
        new = Path(f"{path}.{uuid.uuid4()}")
        new.write_bytes(data)
        try:
            os.link(new, path)  # fails where a file is, unlike a replacement
        except FileExistsError:
            if Path(path).read_bytes() != data:
                os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
        return path
