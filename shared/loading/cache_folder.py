"""The user's cache of model folders that are made from other files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diptych"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to be filled in the block, which then becomes `folder`: other processes find a whole one or
    none. Raises `OSError` if it cannot be written; another process may be faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
