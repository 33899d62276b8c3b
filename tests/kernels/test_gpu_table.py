"""The table of a GPU: its file, and how `diptych tune` fills it, with measurements faked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optimized.kernels import gpu_table, moe_tiles, moe_tune, tune
from optimized.kernels.gpu_table import FORMAT, GpuTable
from shared.config import ModelConfig
from shared.loading.model_path import resolve_model_path

TABLE = GpuTable(
    gpu="A GPU",
    torch="2.13.0",
    triton="3.9.0",
    experts={"8 experts, top 2, 64-32": {"4": [[2, 1, 2, 4], [8, 1, 4, 4]]}},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(gpu_table, "FOLDER", tmp_path / "tables")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    gpu_table.read.cache_clear()
    moe_tiles._measured.cache_clear()
    yield tmp_path / "tables"
    gpu_table.read.cache_clear()
    moe_tiles._measured.cache_clear()


def test_it_is_read_as_it_was_written(folder: Path) -> None:
    assert gpu_table.read("A GPU") == GpuTable("A GPU")
    path = gpu_table.write(TABLE)
    assert path == folder / "A_GPU.json"
    assert (gpu_table.read("A GPU"), gpu_table.read("another")) == (TABLE, GpuTable("another"))
    assert json.loads(path.read_text())["format"] == FORMAT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 1}, rf"A_GPU.json has format {FORMAT + 1}.*reads format {FORMAT}.*diptych tune"),
        ({"format": None}, "has format None"),
        ({"algorithms": {}}, "may have"),
    ],
)
def test_a_file_of_another_format_is_refused(changes: dict[str, object], message: str, folder: Path) -> None:
    path = gpu_table.write(TABLE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    gpu_table.read.cache_clear()
    with pytest.raises(ValueError, match=message):
        gpu_table.read("A GPU")


def test_tables_of_the_package_are_named_after_their_gpu() -> None:
    paths = sorted(gpu_table.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        table = gpu_table.parse(path.read_text())
        assert gpu_table.path_of(table.gpu) == path
        assert path.read_text() == gpu_table.dumps(table)


def test_experts_without_a_table_follow_the_rule(folder: Path) -> None:
    assert moe_tiles.describe(torch.device("cuda")) == (
        False,
        "a rule chooses: nothing was measured on A GPU",
    )
    gpu_table.write(TABLE)
    assert moe_tiles.describe(torch.device("cuda")) == (True, "8 experts, top 2, 64-32")


def config(name: str) -> ModelConfig:
    return ModelConfig.from_pretrained(resolve_model_path(name, "dummy"))


def test_tune_keeps_what_it_does_not_measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and numbers of tokens of earlier runs stay; the file is written after each measurement."""
    name = moe_tune.shape_of(config("tiny-moe")).name()
    before = GpuTable("A GPU", experts={**TABLE.experts, name: {"4": [[1, 1, 1, 1], [1, 1, 1, 1]]}})
    gpu_table.write(before)
    plan = moe_tiles.default_plan(moe_tune.shape_of(config("tiny-moe")), 64, torch.bfloat16)
    written: list[list[str]] = []

    def best_plan(layers: object, num_tokens: int, progress: object) -> tuple[float, moe_tiles.Plan]:
        written.append(sorted(gpu_table.read("A GPU").experts[name]))
        return 1.0, plan

    monkeypatch.setattr(moe_tune, "compile_all", lambda *_: None)
    monkeypatch.setattr(moe_tune, "Layers", lambda *_: None)
    monkeypatch.setattr(moe_tune, "best_plan", best_plan)
    path = tune.tune([config("tiny-moe"), config("tiny-dense")], [64, 8, 16])
    table = gpu_table.parse(path.read_text())
    assert written == [["4"], ["4", "8"], ["16", "4", "8"]]
    assert set(table.experts) == {name, "8 experts, top 2, 64-32"}
    assert moe_tiles._measured("A GPU")[name][64] == plan
    assert table.torch == torch.__version__


def test_tune_needs_experts(folder: Path) -> None:
    with pytest.raises(ValueError, match="has experts"):
        tune.tune([config("tiny-dense")])
