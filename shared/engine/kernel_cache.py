"""Compiled kernels in one file: `diptych warm` writes it, and an engine with `kernel_cache` starts with it.

The file is a tar archive of what Triton and FlashInfer keep on disk, with a manifest of what the kernels were
compiled for. It contains programs: use a file only from where you would install software. A file for another
GPU, torch, Triton, FlashInfer or source is ignored, with one line that names the difference.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from diptych.shared import hardware

MANIFEST = "manifest.json"
KEPT = (".cubin", ".json", ".so")
"""Of Triton's files; the others are intermediate forms."""
ROOT = Path(__file__).parents[2]


def manifest() -> dict[str, str]:
    """What the kernels of this process are compiled for."""
    packages = {name: hardware.installed_version(name) or "none" for name in ("triton", "flashinfer-python")}
    source = hashlib.sha256()
    for file in sorted((ROOT / "optimized").rglob("*.py")):
        source.update(file.read_bytes())
    python = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}"
    gpu = torch.cuda.get_device_name()
    return {
        "gpu": gpu,
        "python": python,
        "torch": torch.__version__,
        **packages,
        "source": source.hexdigest()[:16],
    }


def triton_folder() -> Path:
    """Where Triton keeps its kernels."""
    default = Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    return Path(os.environ.get("TRITON_CACHE_DIR", default))


def flashinfer_folder() -> Path:
    """Where unpacked modules of FlashInfer for this GPU are: NAME/NAME.so each."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    version = hardware.installed_version("flashinfer-python")
    return base / ".cache" / "diptych" / f"flashinfer-{version}-sm_{major}{minor}"


def pack(file: Path, triton: Path, modules: Path, made_for: dict[str, str]) -> int:
    """Write a file of all compiled kernels of two folders; `modules`: FlashInfer's. Returns the number of
    kernels and modules."""
    num = 0
    with tarfile.open(file, "w:gz") as tar:
        data = json.dumps(made_for).encode()
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
        for path in sorted(triton.rglob("*")):
            if path.suffix in KEPT and path.is_file():
                tar.add(path, f"triton/{path.relative_to(triton).as_posix()}")
                num += path.suffix == ".cubin"
        for path in sorted(modules.rglob("*.so")):
            tar.add(path, f"flashinfer/{path.parent.name}/{path.name}")
            num += 1
    return num


def unpack(file: Path) -> str:
    """Put the kernels of a file where the compilers look for them, beside what is there. Returns one line
    for the user. Raises `ValueError` for a file that is no such archive."""
    try:
        with tarfile.open(file) as tar:
            found = json.loads(_read(tar, MANIFEST))
            wanted = manifest()
            different = [name for name in wanted if found.get(name) != wanted[name]]
            if different:
                name = different[0]
                return f"{file} is ignored: it is for {name} {found.get(name)}, and this is {wanted[name]}"
            num = sum(_place(tar, member) for member in _files(tar))
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise ValueError(f"kernel_cache={file} cannot be read: {error}") from None
    return f"{file}: {num} new files of compiled kernels"


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        path = PurePosixPath(member.name)
        if member.isfile() and len(path.parts) == 3 and path.parts[0] in ("triton", "flashinfer"):
            if ".." in path.parts:
                raise ValueError(f"it has a file {member.name}")
            yield member


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
    """Write one file. False: it is there already."""
    compiler, folder, name = PurePosixPath(member.name).parts
    target = (triton_folder() if compiler == "triton" else flashinfer_folder()) / folder / name
    if target.exists():
        return False
    data = _read(tar, member)
    if name.startswith("__grp__"):
        data = _moved(data, target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{name}.{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, target)  # whole files only: another engine may be reading
    return True


def _moved(data: bytes, folder: Path) -> bytes:
    """Triton's list of the files of a kernel, which has whole paths, for another folder."""
    group: dict[str, Any] = json.loads(data)
    names = [name for name in group["child_paths"] if Path(name).suffix in KEPT]
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | str) -> bytes:
    content = tar.extractfile(member)
    assert content is not None
    return content.read()
