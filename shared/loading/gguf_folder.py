"""A GGUF file as a model folder: config.json and tokenizer from its metadata, and a link to the file, from
which `gguf_weights` reads the tensors.

The folder is in the user's cache and takes a few MB. Its name has a hash of the file's place, size and time,
and of this code, so a change of any makes a new folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from diptych.shared.loading.cache_folder import cache_folder, new_folder
from diptych.shared.loading.gguf_config import config_of
from diptych.shared.loading.gguf_reader import open_gguf, parts_of
from diptych.shared.loading.gguf_tokenizer import tokenizer_files
from diptych.shared.loading.gguf_weights import LINK


def gguf_folder(file: Path) -> Path:
    """The model folder of a GGUF file, or of the first of its parts. Raises `ValueError` for a damaged file
    and for what is not supported, `ImportError` without the package `gguf`, `OSError` if the cache cannot be
    written."""
    file = file.resolve()
    stats = [(part, part.stat()) for part in parts_of(file)]
    places = "\n".join(f"{part} {stat.st_size} {stat.st_mtime_ns}" for part, stat in stats)
    digest = hashlib.blake2b(places.encode(), digest_size=8)
    for code in sorted(Path(__file__).parent.glob("gguf_*.py")):
        digest.update(code.read_bytes())
    folder = cache_folder() / f"{file.stem}-gguf-{digest.hexdigest()}"
    if folder.is_dir():
        return folder
    gguf = open_gguf(file)
    files = {"config.json": json.dumps(config_of(gguf, file)), **tokenizer_files(gguf.values, file)}
    with new_folder(folder) as temporary:
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        (temporary / LINK).symlink_to(file)
    return folder
