"""GGUF files in several parts, which the package's writer cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_file

from diptych.shared.loading.gguf_folder import gguf_folder
from diptych.shared.loading.gguf_reader import open_gguf

NAMES = [f"blk.{i}.attn_norm.weight" for i in range(5)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parts(folder: Path, **values: Any) -> list[Path]:
    """Three parts, of two, two and one tensors."""
    tensors = {name: np.full(4, i, np.float32) for i, name in enumerate(NAMES)}
    write_file(folder / "m.gguf", "llama", {"llama.block_count": 5, **values}, tensors, split_max_tensors=2)
    return sorted(folder.glob("*.gguf"))


def test_all_parts_are_read(tmp_path: Path) -> None:
    files = parts(tmp_path)
    assert [file.name for file in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found = open_gguf(files[0])
    assert found.values["llama.block_count"] == 5
    assert {name: tensor.data.tolist() for name, tensor in found.tensors.items()} == {
        name: [i] * 4 for i, name in enumerate(NAMES)
    }


def test_parts_that_are_not_whole(tmp_path: Path) -> None:
    first, second, third = parts(tmp_path)
    with pytest.raises(ValueError, match=r"is part 2 of 3; name the first: m-00001-of-00003\.gguf"):
        gguf_folder(second)
    data = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"00003-of-00003\.gguf: split\.no and split\.count are not those"):
        open_gguf(first)
    third.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"00003-of-00003\.gguf is no GGUF file, or is damaged"):
        open_gguf(first)
    third.unlink()
    with pytest.raises(ValueError, match=r"m-00003-of-00003\.gguf of its 3 parts are missing"):
        gguf_folder(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match=r"is one of 3 parts; their names must end in -00001-of-00003"):
        open_gguf(tmp_path / "renamed.gguf")


def test_other_tensors_than_the_first_part_counts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    files = parts(tmp_path / "a")
    tensors = {f"{name}{i}": np.zeros(4, np.float32) for i in range(2) for name in "xyz"}
    write_file(tmp_path / "b" / "m.gguf", "llama", {}, tensors, split_max_tensors=2)
    files[2].write_bytes((tmp_path / "b" / files[2].name).read_bytes())
    with pytest.raises(ValueError, match=r"its parts have 6 tensors; split\.tensors\.count is 5"):
        open_gguf(files[0])
