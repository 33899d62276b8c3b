"""A GGUF file, or the files into which one is split, through the reader of the package `gguf`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Gguf(NamedTuple):
    values: dict[str, Any]  # the metadata: of the first file
    tensors: dict[str, Any]  # the reader's tensors by name: of all files


def parts_of(file: Path) -> list[Path]:
    """The file, or all parts of which it is the first. Raises `ValueError` for another part, and for parts
    that are missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    stem, number, count = match[1], int(match[2]), int(match[3])
    parts = [file.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if number != 1:
        raise ValueError(
            f"{file} is part {number} of {count}; name the first: {stem}-00001-of-{match[3]}.gguf"
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{file}: {', '.join(missing[:3])} of its {count} parts are missing")
    return parts


def open_gguf(file: Path) -> Gguf:
    """Maps the file and its other parts into memory. Raises `ValueError` for damaged files and for parts that
    do not belong together, `ImportError` without the package `gguf`."""
    parts = parts_of(file)
    values, tensors = _read(parts[0])
    if (count := values.get("split.count", 0)) > 1 and count != len(parts):
        raise ValueError(
            f"{file} is one of {count} parts; their names must end in -00001-of-{count:05d}.gguf and so on"
        )
    for number, part in enumerate(parts[1:], 1):
        found, more = _read(part)
        if (found.get("split.no"), found.get("split.count")) != (number, count):
            raise ValueError(
                f"{part}: split.no and split.count are not those of part {number + 1} of {count}"
            )
        if twice := tensors.keys() & more.keys():
            raise ValueError(f"{part}: {min(twice)} is in another part too")
        tensors |= more
    wanted = values.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ValueError(f"{file}: its parts have {len(tensors)} tensors; split.tensors.count is {wanted}")
    return Gguf(values, tensors)


def _read(file: Path) -> Gguf:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError("a GGUF file needs the package gguf: pip install 'diptych[gguf]'") from None
    try:
        reader = GGUFReader(file)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # of any kind: what a broken file raises depends on how it is broken
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{file} is no GGUF file, or is damaged: {reason:.200}") from None
    return Gguf(values, {tensor.name: tensor for tensor in reader.tensors})
