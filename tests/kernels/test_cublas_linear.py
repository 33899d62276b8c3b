"""GEMMs by cuBLAS: when a measured algorithm is taken, and that it changes time alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimized import layers
from optimized.kernels import cublas_linear, cublas_lt, gemm_search, gpu_table, small_batch_linear
from optimized.kernels.cublas_linear import STEP, Shape, Table
from optimized.kernels.cublas_lt import Config, Problem, Product
from optimized.kernels.gpu_table import GpuTable
from shared.conformance.compare import expect_close, expect_equal
from shared.conformance.device import building
from shared.conformance.inputs import HALF_TYPES, Inputs, type_name
from shared.conformance.poison import poisoned, run_poisoned
from shared.conformance.tolerance import Tolerance
from tests.kernels.test_small_batch_linear import close

CONFIG = Config(66, 15, 1, 0, 0, 1, 35, 0, 2)
OTHER = CONFIG._replace(tile_id=18, splitk_num=2, reduction_scheme=2)
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16
IN_FLOAT32 = Tolerance(
    2e-4,
    0.0,
    4e-5,
    "tensor cores cut sums off at 24 bits, 2^-24 of a sum on average in each of up to 1100 steps",
)


def test_an_entry_serves_those_who_have_as_many_tiles() -> None:
    shape = Shape(40, 24)
    table = Table("13.1.0", {shape: {64: CONFIG, 80: OTHER}, Shape(40, 24, True): {64: OTHER}})

    def found(num_tokens: int, shape: Shape = shape) -> Config | None:
        return cublas_linear.config_for(shape.problem(num_tokens), table)

    assert [found(n) for n in (56, 57, 64, 65, 72, 73, 80, 81)] == [
        *(None, CONFIG, CONFIG, None),
        *(None, OTHER, OTHER, None),
    ]
    table.configs[shape] |= {512: CONFIG, 2048: OTHER, 4096: None, 8192: CONFIG}
    assert [found(n) for n in (512, 513, 2047, 2048, 4095, 4096, 8191, 8192, 99999)] == [
        *(CONFIG, None, None, OTHER, OTHER, None, None, CONFIG, CONFIG),
    ]
    assert found(64, Shape(40, 24, True)) == OTHER
    assert found(64, Shape(48, 24)) is found(64, Shape(40, 32)) is None


def test_measured_tables_can_be_read_and_serve_what_they_hold() -> None:
    paths = sorted(gpu_table.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        table = cublas_linear.table_of(gpu_table.read(path.stem))
        assert table.version.count(".") == 2
        assert table.configs
        for shape, by_tokens in table.configs.items():
            for num_tokens, config in by_tokens.items():
                assert num_tokens > 0
                assert num_tokens % STEP == 0
                for dtype in HALF_TYPES:
                    assert cublas_linear.config_for(shape.problem(num_tokens, dtype), table) == config


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([66, 15, 1, 0, 0, 1, 35, 0], "9 numbers"),
        ([66, 15, 2, 4, 0, 1, 35, 0, 2], "not added up in float32"),
        ([66, 15, 2, 1, 0, 1, 35, 0, 2], "not added up in float32"),
        ([66, 15, 2, 0, 0, 1, 35, 0, 2], "not added up in float32"),
    ],
)
def test_a_table_of_other_algorithms_is_refused(numbers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cublas_linear.table_of(GpuTable("GPU", gemms={"40 to 24": {"64": numbers}}))


class Library:
    """Has CONFIG."""

    def __init__(self, version: str = "13.1.0") -> None:
        self.functions = SimpleNamespace(version=lambda: version)

    def prepare(self, problem: Problem, config: Config) -> object:
        return (problem, config) if config == CONFIG else None


def test_no_library_another_version_or_one_without_the_algorithm_leaves_it_to_cublas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table("13.1.0", {Shape(40, 24): {64: CONFIG, 128: OTHER}})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(cublas_linear, "table", lambda _: table)

    def prepared(num_tokens: int) -> object:
        x, weight = torch.Size((num_tokens, 40)), torch.Size((24, 40))
        return cublas_linear._prepared.__wrapped__(x, weight, BF16, BF16, CUDA)

    monkeypatch.setattr(cublas_lt, "library", lambda _: Library())
    assert [prepared(n) for n in (64, 128, 192)] == [(Problem(64, 24, 40, BF16, BF16), CONFIG), None, None]
    for library in (Library("13.2.0"), None):
        monkeypatch.setattr(cublas_lt, "library", lambda _, library=library: library)
        assert prepared(64) is None


def test_the_doctor_says_how_many_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"GPU": Table("13.1.0", {Shape(40, 24): {64: CONFIG, 72: CONFIG}, Shape(24, 40): {64: OTHER}})}
    monkeypatch.setattr(cublas_linear, "table", lambda gpu: tables.get(gpu, Table("", {})))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    for library, expected in (
        (Library(), (True, "2 of 3 measured ones (cuBLAS 13.1.0)")),
        (Library("13.2.0"), (False, "cuBLAS chooses: the table is of cuBLAS 13.1.0, and this is 13.2.0")),
        (None, (False, "cuBLAS chooses: this PyTorch has no cuBLASLt")),
    ):
        monkeypatch.setattr(cublas_lt, "library", lambda _, library=library: library)
        assert cublas_linear.describe(CUDA) == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    assert cublas_linear.describe(CUDA) == (False, "cuBLAS chooses: nothing was measured on another")


class Recorder:
    """Stands in for a measured GEMM on the CPU."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.calls: list[tuple[int, int, bool]] = []

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, add: bool = False) -> bool:
        if not self.takes:
            return False
        self.calls.append((len(x), len(weight), add))
        result = x.float() @ weight.float().T
        y.copy_(y + result if add else result)
        return True


def use(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Recorder:
    monkeypatch.setattr(cublas_linear, "measured_gemm", lambda *_: recorder)
    return recorder


@pytest.mark.parametrize("num_tokens", [40, 100])
def test_every_layer_takes_it_where_cublas_would_multiply(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, inputs = use(monkeypatch, Recorder()), Inputs(0)
    monkeypatch.setattr(small_batch_linear, "kernel_for", lambda *_, **__: "cublas")
    with building(BF16):
        merged, down = layers.MergedLinear(48, {"a": 16, "b": 8}), layers.Linear(24, 48)
        mlp, norm = layers.MLP(48, 40), layers.RMSNorm(48, 1e-6)
    for module in (merged, down, mlp, norm):
        inputs.fill_(module)
    h = inputs.normal(num_tokens, 48, dtype=BF16)
    y = run_poisoned(merged, h, norm)
    total = run_poisoned(down.add_to, h.clone(), y)
    activated = run_poisoned(mlp.activate, h, norm)
    logits = run_poisoned(layers.logits, h, merged.weight)
    called = [(24, False), (48, True), (80, False), (24, False)]
    assert recorder.calls == [(num_tokens, *call) for call in called]
    assert logits.dtype == torch.float32
    expect_close("sum", total, h.double() + y.double() @ down.weight.double().T, close(BF16, "elementwise"))
    monkeypatch.undo()
    monkeypatch.setattr(small_batch_linear, "kernel_for", lambda *_, **__: "cublas")
    expect_close(
        "activation", activated, run_poisoned(mlp.activate, h, norm).double(), close(BF16, "elementwise")
    )


def test_a_bias_is_added_by_cublas_or_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, inputs = use(monkeypatch, Recorder()), Inputs(0)
    x, weight, bias = (inputs.normal(*shape) for shape in ((6, 40), (24, 40), (24,)))
    weight *= 0.1
    expected = x.double() @ weight.double().T + bias.double()
    expect_close("y", cublas_linear.linear(x, weight, bias), expected, close(torch.float32, "elementwise"))
    assert recorder.calls == []
    residual = inputs.normal(6, 24)
    expected = expected + residual.double()
    y = cublas_linear.linear_add(x, weight, residual, bias)
    expect_close("sum", y, expected, close(torch.float32, "elementwise"))
    assert recorder.calls == [(6, 24, True)]


def test_memory_that_it_does_not_take_is_left_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, inputs = use(monkeypatch, Recorder(takes=False)), Inputs(0)
    x, weight, residual = (inputs.normal(*shape) for shape in ((6, 40), (24, 40), (6, 24)))
    weight *= 0.1
    expected = x.double() @ weight.double().T
    expect_close("y", cublas_linear.linear(x, weight), expected, close(torch.float32, "elementwise"))
    expected = expected + residual.double()
    y = cublas_linear.linear_add(x, weight, residual)
    expect_close("sum", y, expected, close(torch.float32, "elementwise"))
    assert recorder.calls == []


def test_a_cpu_and_float32_are_left_to_cublas() -> None:
    for dtype in (BF16, torch.float32):
        x, weight = torch.zeros(64, 40, dtype=dtype), torch.zeros(24, 40, dtype=dtype)
        assert cublas_linear.measured_gemm(x, weight, dtype) is None


# ---- on a GPU ----


def proposed(problem: Problem, in_parts: bool = False) -> Product:
    """By an algorithm that any GPU's library proposes, or by one of these in parts."""
    library = cublas_lt.library(CUDA)
    assert library is not None
    configs = gemm_search.proposals(library, problem)
    if in_parts:
        tiles = gemm_search.tiles(library, problem, configs)
        configs = list(gemm_search.split(problem, list(tiles)))
    prepared = (library.prepare(problem, config) for config in configs)
    return next(product for product in prepared if product is not None)


def normal(*shape: int, dtype: torch.dtype, std: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Made on the GPU: there are billions."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=CUDA).normal_(0, std, generator=generator)


def integers(*shape: int, most: int = 3) -> torch.Tensor:
    """Matrices whose GEMM is exact in float32, in any order."""
    return (Inputs(shape[0]).integers(2 * most + 1, *shape) - most).to(BF16)


def expect_close_there(what: str, y: torch.Tensor, expected: torch.Tensor, rounding: Tolerance) -> None:
    """expect_close without copies to the CPU: there are billions of numbers."""
    error = (y - expected).abs()
    assert bool((error <= rounding.atol + rounding.rtol * expected.abs()).all()), f"{what}: {error.max()}"
    assert float(error.norm()) <= rounding.rms * float(expected.norm()), what


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
def test_measured_algorithms_against_float64(dtype: torch.dtype) -> None:
    """All of them in bfloat16, in which they were measured; one of each GEMM in float16."""
    table = cublas_linear.table(torch.cuda.get_device_name())
    library = cublas_lt.library(CUDA)
    assert library is not None
    if library.functions.version() != table.version:
        return  # test_no_library_another_version... : the table is ignored
    may_refuse = dtype != BF16
    for shape, by_tokens in table.configs.items():
        weight = normal(shape.out_features, shape.in_features, dtype=dtype, std=shape.in_features**-0.5)
        measured = [num_tokens for num_tokens, config in by_tokens.items() if config is not None]
        for num_tokens in measured[: None if dtype == BF16 else 1]:
            name, problem = f"{shape.name()}, {num_tokens} tokens", shape.problem(num_tokens, dtype)
            x = normal(num_tokens, shape.in_features, dtype=dtype, seed=1)
            product = cublas_linear.measured_gemm(x, weight, problem.out_dtype)
            assert product is not None or may_refuse, f"{name}: refused"
            if product is None:
                continue
            rounding = IN_FLOAT32 if shape.in_float32 else close(dtype, "elementwise")
            expected = torch.cat([x.double() @ part.double().T for part in weight.split(8192)], dim=1)
            y = poisoned(expected.shape, problem.out_dtype, CUDA)
            assert product(x, weight, y)
            expect_close_there(name, y, expected, rounding)
            expected += y.fill_(1.5)
            assert product(x, weight, y, add=True)
            expect_close_there(f"{name}, added", y, expected, rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_sum_with_the_residual_is_rounded_once_or_behind_the_product(in_parts: bool) -> None:
    """Nowhere else: sums before that are exact."""
    x, weight, residual = integers(64, 2048), integers(1024, 2048), integers(64, 1024, most=200)
    exact = x.double() @ weight.double().T
    once = (residual.double() + exact).to(BF16)
    twice = (residual.double() + exact.to(BF16).double()).to(BF16)
    y = residual.clone()
    assert proposed(Problem(64, 1024, 2048, BF16, BF16), in_parts)(x, weight, y, add=True)
    assert bool(((y == once) | (y == twice)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("in_parts", [False, True])
def test_replays_and_streams_side_by_side_give_the_same_bits(in_parts: bool) -> None:
    """In parts it needs a workspace, of each call its own."""
    product = proposed(Problem(128, 2048, 4096, BF16, BF16), in_parts)
    assert product.workspace_size > 0 or not in_parts
    inputs = Inputs(0)
    xs = [inputs.normal(128, 4096, dtype=BF16) for _ in range(2)]
    weight = inputs.normal(2048, 4096, dtype=BF16, std=4096**-0.5)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.full((128, 2048), torch.nan, dtype=BF16, device=CUDA)
        product(x, weight, y)
        return y

    expected = [run(x) for x in xs]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(x) for x in xs]
    graph.replay()
    torch.cuda.synchronize()
    for y, want in zip(captured, expected):
        expect_equal("replayed", y, want)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, x, ys in zip(streams, xs, found):
            with torch.cuda.stream(stream):
                ys.append(run(x))
    torch.cuda.synchronize()
    for ys, want in zip(found, expected):
        for y in ys:
            expect_equal("beside another", y, want)


@pytest.mark.gpu
def test_rows_that_begin_anywhere_are_left_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(0)
    weight = inputs.normal(1024, 512, dtype=BF16, std=512**-0.5)
    x = inputs.normal(64 * 512 + 1, dtype=BF16)[1:].view(64, 512)
    product = proposed(Problem(64, 1024, 512, BF16, BF16))
    monkeypatch.setattr(cublas_linear, "measured_gemm", lambda *_: product)
    assert not product(x, weight, torch.empty(64, 1024, dtype=BF16, device=CUDA))
    y = cublas_linear.linear(x, weight)
    expect_close("y", y, x.double() @ weight.double().T, close(BF16, "elementwise"))
