"""Quantized versions of the built-in models: "tiny-dense-int4" and the like.

A version is written to the user's cache when it is first used, in less than a second. Its folder name
includes a hash of the model's weights and of the quantizing code, so a change of either makes a new
version."""

from __future__ import annotations

import hashlib
from pathlib import Path

from diptych.shared.loading import quantize, save_quantized
from diptych.shared.loading.cache_folder import cache_folder, new_folder
from diptych.shared.loading.safetensors_file import SINGLE_FILE


def quantized_folder(source: Path, method: str) -> Path:
    """The folder of the quantized version of the built-in model in `source`. Raises `OSError` if the cache
    cannot be written."""
    digest = hashlib.blake2b(digest_size=8)
    for file in (source / SINGLE_FILE, source / "config.json", quantize.__file__, save_quantized.__file__):
        digest.update(Path(file).read_bytes())
    folder = cache_folder() / f"{source.name}-{method}-{digest.hexdigest()}"
    if folder.is_dir():
        return folder
    with new_folder(folder) as temporary:
        save_quantized.save_quantized(source, temporary, method)
    return folder
