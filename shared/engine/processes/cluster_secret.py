"""The secret that processes on several computers prove to each other."""

from __future__ import annotations

import os
from pathlib import Path

from diptych.shared.parallel.channel import MIN_SECRET_BYTES

SECRET = "DIPTYCH_CLUSTER_SECRET"


def cluster_secret(file: str | None) -> bytes:
    """The secret of a file, or of the environment. Raises `ValueError` if there is none, or if others may
    read the file."""
    if file is not None:
        path = Path(file)
        try:
            if path.stat().st_mode & 0o077:
                raise ValueError(f"cluster_secret_file: others may open {path}: chmod 600 {path}")
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"cluster_secret_file: {error}") from None
    else:
        secret = os.environ.get(SECRET, "").encode()
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"ranks of a launcher and split servers need a secret of at least {MIN_SECRET_BYTES} bytes, the "
            f"same for all: in {SECRET}, or in a file that cluster_secret_file names"
        )
    return secret
