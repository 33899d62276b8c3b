"""The file of compiled kernels: what it keeps, where it goes, and for what it is ignored."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from diptych.shared.engine import kernel_cache

HERE = {"gpu": "NVIDIA H100", "torch": "2.11.0", "source": "ab"}


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one kernel and one module, on a computer that has neither."""
    kernel, module = tmp_path / "made/triton/KEY", tmp_path / "made/flashinfer/cached_ops/prefill"
    kernel.mkdir(parents=True)
    module.mkdir(parents=True)
    files = {"k.cubin": "binary", "k.ptx": "text", "k.json": "{}"}
    for name, text in files.items():
        (kernel / name).write_text(text)
    group = {"child_paths": {name: str(kernel / name) for name in files}}
    (kernel / "__grp__k.json").write_text(json.dumps(group))
    (module / "prefill.so").write_text("library")
    (module / "prefill.cuda.o").write_text("object")
    file = tmp_path / "kernels.tar"
    assert kernel_cache.pack(file, tmp_path / "made/triton", tmp_path / "made/flashinfer", HERE) == 2
    monkeypatch.setattr(kernel_cache, "manifest", lambda: HERE)
    monkeypatch.setattr(kernel_cache, "triton_folder", lambda: tmp_path / "t")
    monkeypatch.setattr(kernel_cache, "flashinfer_folder", lambda: tmp_path / "f")
    return file


def test_kernels_go_where_compilers_look(packed: Path, tmp_path: Path) -> None:
    assert kernel_cache.unpack(packed) == f"{packed}: 4 new files of compiled kernels"
    folder = tmp_path / "t/KEY"
    assert sorted(path.name for path in folder.iterdir()) == ["__grp__k.json", "k.cubin", "k.json"]
    # Triton's list has whole paths: those of the new place, without the files that were left out.
    names = json.loads((folder / "__grp__k.json").read_text())["child_paths"]
    assert names == {name: str(folder / name) for name in ("k.cubin", "k.json")}
    assert [path.name for path in (tmp_path / "f/prefill").iterdir()] == ["prefill.so"]
    assert kernel_cache.unpack(packed) == f"{packed}: 0 new files of compiled kernels"


@pytest.mark.parametrize("name", HERE)
def test_a_file_for_something_else_is_ignored(
    packed: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "manifest", lambda: {**HERE, name: "other"})
    line = kernel_cache.unpack(packed)
    assert line == f"{packed} is ignored: it is for {name} {HERE[name]}, and this is other"
    assert not (tmp_path / "t").exists()


def test_a_file_that_is_none_is_an_error(packed: Path, tmp_path: Path) -> None:
    for content in (b"", b"no archive"):
        broken = tmp_path / "broken.tar"
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"kernel_cache=.*broken.tar cannot be read"):
            kernel_cache.unpack(broken)
    with pytest.raises(ValueError, match="cannot be read"):
        kernel_cache.unpack(tmp_path / "missing.tar")


def test_no_file_is_written_outside(packed: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    with tarfile.open(bad, "w") as tar:
        for name, data in (("manifest.json", json.dumps(HERE)), ("triton/../x.json", "{}"), ("/etc/x", "")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data.encode()))
    with pytest.raises(ValueError, match=r"it has a file triton/\.\./x.json"):
        kernel_cache.unpack(bad)
    assert not (tmp_path / "x.json").exists()
