"""The table of a GPU: its file, and how `diptych tune` fills it, with measurements faked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from diptych.optimized.kernels import gpu_table
from diptych.optimized.kernels.gpu_table import FORMAT, GpuTable
from diptych.optimized.kernels.linear import linear_choice, quantized_choice
from diptych.optimized.kernels.linear.quantize_input import QuantizedInput
from diptych.optimized.kernels.linear.quantized_choice import Choice, Dequantized
from diptych.optimized.kernels.linear.quantized_gemv import GemvTile
from diptych.optimized.kernels.linear.quantized_tiles import Tile
from diptych.optimized.kernels.moe import moe_tiles
from diptych.optimized.kernels.portable import Gpu
from diptych.optimized.tune import linear_tune, moe_tune, quantized_tune, tune
from diptych.shared.config import ModelConfig, read_config
from diptych.shared.config.quant_config import ONLINE
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.types.quant_scheme import QuantScheme

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
    caches = gpu_table.read, moe_tiles._measured, linear_choice._measured, quantized_choice._measured
    for cache in caches:
        cache.cache_clear()
    yield tmp_path / "tables"
    for cache in caches:
        cache.cache_clear()


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
    return read_config(resolve_model_path(name, "dummy"))


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

    monkeypatch.setattr(linear_tune, "shapes_of", lambda _: [])
    monkeypatch.setattr(moe_tune, "compile_all", lambda *_: None)
    monkeypatch.setattr(moe_tune, "Layers", lambda *_: None)
    monkeypatch.setattr(moe_tune, "best_plan", best_plan)
    path = tune.tune([config("tiny-moe"), config("tiny-dense")], [64, 8, 16])
    table = gpu_table.parse(path.read_text())
    assert written == [["4"], ["4", "8"], ["16", "4", "8"]]
    assert set(table.experts) == {name, "8 experts, top 2, 64-32"}
    assert moe_tiles._measured("A GPU")[name][64] == plan
    assert table.torch == torch.__version__


class OnGpu(NamedTuple):
    """As much of a tensor on a GPU as the choice looks at."""

    tensor: torch.Tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getattr__(self, name: str) -> Any:
        return torch.device("cuda") if name == "device" else getattr(self.tensor, name)


def test_tune_measures_linear_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest candidate of each number of tokens is written, and chosen up to there; beyond what was
    measured, and for other shapes, the rule holds."""
    shape = linear_tune.LinearShape(2048, 4096)
    x, weight = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(2048, 4096, dtype=torch.bfloat16)
    asked: list[tuple[str, int]] = []

    def time_kernel(kernel: str, weights: object, num_tokens: int, gated: bool) -> float:
        asked.append((kernel, num_tokens))
        return {"warp_gemv": 1.0, "sliced_k_gemm": 2.0, "cublas": 3.0}.get(kernel, 4.0)

    monkeypatch.setattr(linear_tune, "shapes_of", lambda _: [shape, shape])
    monkeypatch.setattr(linear_tune, "_weights", lambda _: [weight])
    monkeypatch.setattr(linear_tune, "compile_all", lambda *_: None)
    monkeypatch.setattr(linear_tune, "time_kernel", time_kernel)
    tune.tune([config("tiny-dense")], [32, 4, 8])
    assert gpu_table.read("A GPU").linear == {
        "2048 x 4096": {"4": "warp_gemv", "8": "sliced_k_gemm", "32": "cublas"}
    }
    assert asked == [
        *(("cublas", 4), ("warp_gemv", 4), ("sliced_k_gemm", 4), ("tiled_gemm", 4)),
        *(("cublas", 8), ("sliced_k_gemm", 8), ("tiled_gemm", 8)),
        *(("cublas", 32), ("tiled_gemm", 32)),
    ]

    def chosen(num_tokens: int, gated: bool = False) -> str:
        return linear_choice.kernel_for(OnGpu(x[:num_tokens]), weight, gated)  # type: ignore[arg-type]

    measured = [chosen(num_tokens) for num_tokens in (1, 4, 5, 8, 9, 32)]
    assert measured == ["warp_gemv"] * 2 + ["sliced_k_gemm"] * 2 + ["cublas"] * 2
    assert chosen(33) == linear_choice.rule(x[:33], weight)
    assert chosen(5, gated=True) == linear_choice.rule(x[:5], weight, gated=True) == "tiled_gemm"
    assert linear_choice.kernel_for(x[:5], weight) == "tiled_gemm"  # on a CPU: no table


def test_layers_that_are_measured() -> None:
    found = linear_tune.shapes_of(config("Qwen3-8B"))
    assert [shape[:3] for shape in found] == [
        (6144, 4096, False), (4096, 4096, False), (24576, 4096, True),
        (4096, 12288, False), (151936, 4096, False)
    ]  # fmt: skip
    assert [shape.added for shape in found] == [False, True, False, True, False]
    assert [shape[:3] for shape in linear_tune.shapes_of(config("Qwen3-30B-A3B"))] == [
        (5120, 2048, False), (2048, 4096, False), (151936, 2048, False), (128, 2048, False)
    ]  # fmt: skip


def test_tune_measures_quantized_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest tile of each number of tokens is written, and chosen up to there; beyond, for other schemes
    and in float32 the rule holds. A GEMV is chosen only for what it computes."""
    fp8, gemv, gemm = ONLINE["fp8"], GemvTile(2, 8, 2, 1), Tile(8, 64, 256, 5, 4)
    many = Tile(128, 128, 128, 3, 8)
    shape = linear_tune.LinearShape(2048, 4096)

    def fastest_tile(
        scheme: object, layers: object, num_tokens: int, added: bool
    ) -> tuple[Tile | GemvTile | None, float]:
        return {1: gemv, 8: gemm, 96: None, 128: many}[num_tokens], 1.0

    monkeypatch.setattr(linear_tune, "decoder_shapes_of", lambda _: [shape, shape])
    monkeypatch.setattr(quantized_tune, "_layers", lambda *_: None)
    monkeypatch.setattr(quantized_tune, "fastest_tile", fastest_tile)
    tune.tune([config("tiny-dense")], [8, 1, 128, 96, 512], [fp8])
    assert gpu_table.read("A GPU").quantized == {
        f"2048 x 4096 {fp8}": {
            "1": ["gemv", 2, 8, 2, 1],
            "8": ["gemm", 8, 64, 256, 5, 4, 1],
            "96": ["cublas"],
            "128": ["gemm", 128, 128, 128, 3, 8, 1],
        }
    }
    weight = OnGpu(torch.empty(2048, 4096, dtype=torch.float8_e4m3fn))

    def chosen(num_tokens: int, scheme: str = "fp8", dtype: torch.dtype = torch.bfloat16) -> object:
        q = torch.empty(num_tokens, 4096, dtype=torch.float8_e4m3fn)
        x = QuantizedInput(q, torch.ones(num_tokens, 1), dtype)
        return quantized_choice.measured_tile(x, weight, ONLINE[scheme])  # type: ignore[arg-type]

    assert [chosen(num_tokens) for num_tokens in (1, 2, 8, 9, 65)] == [gemv, gemm, gemm, None, None]
    assert [chosen(num_tokens) for num_tokens in (97, 128, 129)] == [many, many, None]
    assert chosen(2, "fp8-block") is chosen(2, dtype=torch.float32) is None


def test_what_cublas_multiplies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 64 tokens of row-wise e4m3 in bfloat16, on Hopper, unless the table has a tile."""
    scheme, hopper = ONLINE["fp8"], Gpu((9, 0), 132, 227 * 1024)
    rows = {"128": ["gemm", 128, 128, 128, 3, 8, 1], "192": ["cublas"]}
    gpu_table.write(GpuTable("A GPU", quantized={f"2048 x 4096 {scheme}": rows}))
    monkeypatch.setattr(quantized_choice, "INTERPRETED", False)

    def chosen(
        num_tokens: int,
        out: int = 2048,
        size: int = 4096,
        groups: int = 1,
        x_groups: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        gpu: Gpu = hopper,
        weight_type: torch.dtype = torch.float8_e4m3fn,
    ) -> bool:
        monkeypatch.setattr(quantized_choice, "gpu_of", lambda _: gpu)
        q = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn)
        x = QuantizedInput(q, torch.ones(num_tokens, x_groups), dtype)
        weight: Any = OnGpu(torch.empty(out, size, dtype=torch.float8_e4m3fn).view(weight_type))
        return quantized_choice.goes_to_cublas(x, weight, torch.ones(out, groups), scheme)

    assert [chosen(num_tokens) for num_tokens in (64, 65, 128, 129, 193)] == [False, False, False, True, True]
    assert [chosen(num_tokens, out=4096) for num_tokens in (64, 65)] == [False, True]
    x = QuantizedInput(torch.empty(8, 4096), torch.ones(8, 1), torch.bfloat16)
    few: Any = OnGpu(torch.empty(2048, 4096))
    assert quantized_choice.measured_tile(x, few, scheme) is None, "rows of many tokens are not for few"
    assert chosen(300, out=48, size=48)
    refused: list[dict[str, Any]] = [
        {"out": 2056}, {"size": 4104}, {"groups": 2}, {"x_groups": 2}, {"groups": 2, "x_groups": 2},
        {"dtype": torch.float16}, {"weight_type": torch.int8}, {"gpu": hopper._replace(capability=(8, 9))},
    ]  # fmt: skip
    assert [flags for flags in refused if chosen(300, **flags)] == []
    monkeypatch.setattr(quantized_choice, "INTERPRETED", True)
    assert not chosen(300)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        *((name, num_tokens) for name in ("fp8", "fp8-block", "int8") for num_tokens in (1, 64, 200)),
        *((name, num_tokens) for name in ("int4", "nvfp4") for num_tokens in (1, 64, 200)),
    ],
)
def test_candidates_of_quantized_layers(name: str, num_tokens: int) -> None:
    scheme, x = ONLINE[name], torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
    values = x if scheme.is_packed else QuantizedInput(x, x, x.dtype)
    tiles = list(quantized_tune.candidates(values, scheme, 4096, 4096))
    assert len(set(tiles)) == len(tiles) >= 10
    has_gemv = num_tokens == 1 and name != "int8"
    assert any(isinstance(tile, GemvTile) for tile in tiles) == has_gemv
    assert (Dequantized() in tiles) == (scheme.is_packed and num_tokens > 16)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_usual_sizes_have_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for which there is nothing to choose are left out."""

    def fastest_tile(
        scheme: QuantScheme, layers: object, num_tokens: int, added: bool
    ) -> tuple[Choice, float]:
        x = torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
        values = x if scheme.inputs == "none" else QuantizedInput(x, x, x.dtype)
        return next(quantized_tune.candidates(values, scheme, 2048, 4096)), 1.0

    monkeypatch.setattr(quantized_tune, "_layers", lambda *_: None)
    monkeypatch.setattr(quantized_tune, "fastest_tile", fastest_tile)
    sizes = (*quantized_tune.TOKENS, 512)
    *_, table = quantized_tune.tune(
        GpuTable("A GPU"), ONLINE[name], linear_tune.LinearShape(2048, 4096), sizes
    )
    (rows,) = table.quantized.values()
    assert [int(size) for size in rows] == [size for size in sizes if size <= 256]
    assert (quantized_choice.from_row(rows["256"]) == Dequantized()) == (name == "int4")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_quantized_layers_can_be_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eighth candidate is measured: each is a kernel to compile."""
    candidates = quantized_tune.candidates
    monkeypatch.setattr(quantized_tune, "candidates", lambda *of: list(candidates(*of))[::8])
    (table,) = quantized_tune.tune(GpuTable("A GPU"), ONLINE[name], linear_tune.LinearShape(256, 512), [1])
    (rows,) = table.quantized.values()
    assert quantized_choice.as_row(quantized_choice.from_row(rows["1"])) == rows["1"]


@pytest.mark.gpu
def test_linear_layers_can_be_measured() -> None:
    shape = linear_tune.LinearShape(1024, 512)
    (table,) = linear_tune.tune(GpuTable("A GPU"), shape, [2])
    assert table.linear["1024 x 512"]["2"] in linear_tune._candidates(
        linear_tune._weights(shape)[0], 2, False
    )
