"""Reads and checks the headers of a checkpoint's safetensors files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SUPPORTED_DTYPES = ("F64", "F32", "F16", "BF16")
INDEX_DTYPES = ("I64", "I32", "BOOL")  # of tables that a draft model's checkpoint has beside its weights
MAX_HEADER_BYTES = 100_000_000  # as the format says
QUANTIZED_DTYPES = ("F8_E4M3", "I8", "U8", "I32", "I64")  # of quantized weights and what describes them
ALL_DTYPES = tuple(dict.fromkeys((*SUPPORTED_DTYPES, *INDEX_DTYPES, *QUANTIZED_DTYPES)))
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1} | dict.fromkeys(
    ("F8_E4M3", "I8", "U8"), 1
)
CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_ONE_OF_MORE = re.compile(r"-of-(?!0*1\.)\d+\.safetensors$")
MAX_FILE_NAME = 255  # bytes; of what file systems take


class TensorInfo(NamedTuple):
    path: Path
    shape: tuple[int, ...]
    start: int  # byte offsets within the file's data
    end: int
    dtype: str = "F32"

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_checkpoint(folder: Path, dtypes: tuple[str, ...] = SUPPORTED_DTYPES) -> dict[str, TensorInfo]:
    """The tensors of model.safetensors, of all files named by model.safetensors.index.json, or of the only
    *.safetensors file, in their order on disk. Reads headers only. Raises `ValueError` for any defect of a
    file."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a model is a folder with config.json and *.safetensors")
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE, dtypes)
    if (folder / INDEX_FILE).is_file():
        return _read_shards(folder, dtypes)
    alone = [path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_")]
    if len(alone) == 1 and not _ONE_OF_MORE.search(alone[0].name):
        return read_header(alone[0], dtypes)
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors")
    )
    found = f"found {', '.join(others[:3])}" if others else "no weights at all"
    raise ValueError(
        f"{folder}: {found}; weights must be {SINGLE_FILE}, one other *.safetensors file, or "
        f"files named by {INDEX_FILE}"
    )


def _read_shards(folder: Path, supported: tuple[str, ...]) -> dict[str, TensorInfo]:
    index = folder / INDEX_FILE
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{index} is not an index: it must be JSON with a weight_map ({error!r:.80})"
        ) from None
    if not isinstance(weight_map, Mapping) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map names of tensors to names of files")
    files = sorted(set(weight_map.values()))
    outside = [file for file in files if Path(file).name != file or len(file.encode()) > MAX_FILE_NAME]
    if outside:
        raise ValueError(
            f"{index}: {outside[0]!r:.80} is not a file name; shards are in the folder of their index"
        )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of the {len(files)} files that {INDEX_FILE} names are not there: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = read_header(folder / file, supported)
        indexed = {name for name, its_file in weight_map.items() if its_file == file}
        for problem, names in (
            ("lacks", indexed - header.keys()),
            ("also has", header.keys() - indexed),
        ):
            if names:
                raise ValueError(
                    f"{folder / file} {problem} {', '.join(sorted(names)[:3])}, unlike {INDEX_FILE}: "
                    f"the files are not of one checkpoint"
                )
        tensors |= header
    return tensors


def read_header(path: Path, supported: tuple[str, ...] = SUPPORTED_DTYPES) -> dict[str, TensorInfo]:
    """Read the header. A safetensors file has the header's length (8 bytes, little-endian), a JSON header,
    and the data."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or header_len > num_bytes - 8:
            raise ValueError(
                f"{path} is cut off or not a safetensors file: {num_bytes:,} bytes end in its header"
            )
        if header_len > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: a header of {header_len:,} bytes")
        header = file.read(header_len)
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        infos = {
            name: TensorInfo(path, tuple(map(int, entry["shape"])), start, end, str(entry["dtype"]))
            for name, entry in entries.items()
            for start, end in [map(int, entry["data_offsets"])]
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header is invalid ({error!r})") from None
    promised = 8 + header_len + max((info.end for info in infos.values()), default=0)
    if promised != num_bytes:
        raise ValueError(
            f"{path} is cut off or damaged: its header promises {promised:,} bytes, it has {num_bytes:,}"
        )
    for name, info in infos.items():
        dtype, num_values = info.dtype, math.prod(info.shape)
        if dtype not in supported:
            raise ValueError(f"{path}: {name} is of type {dtype}; supported are {', '.join(supported)}")
        is_valid = min(info.shape, default=0) >= 0 and 0 <= info.start <= info.end
        if not is_valid or num_values * DTYPE_BYTES[dtype] != info.num_bytes:
            raise ValueError(
                f"{path} is damaged: {name} has shape {info.shape} and type {dtype}, and bytes {info.start} "
                f"to {info.end}"
            )
    return dict(sorted(infos.items(), key=lambda item: item[1].start))
