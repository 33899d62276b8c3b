"""cuBLASLt as GEMMs are asked of it: by a stand-in on any machine, and on a GPU by the library itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from optimized.kernels import cublas_lt, cublas_lt_api, gemm_search
from optimized.kernels.cublas_lt import Config, Library, Problem, Product
from optimized.kernels.cublas_lt_api import Algorithm, Candidate, CublasLtError, Functions
from shared.conformance.compare import expect_close
from shared.conformance.inputs import HALF_TYPES, Inputs, type_name
from shared.conformance.poison import poisoned
from tests.kernels.fake_cublas_lt import PROPOSED, STREAM, FakeCublasLt
from tests.kernels.test_small_batch_linear import close

CONFIG = Config(66, 15, 2, 2, 1, 3, 35, 0, 5)
SHAPE = (5, 24, 40)  # tokens, out, in


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCublasLt]:
    monkeypatch.setattr(cublas_lt, "current_stream", lambda _: STREAM)
    library = FakeCublasLt()
    yield library
    assert library.failures == []


def library_of(fake: FakeCublasLt) -> Library:
    return Library(Functions(fake))


def prepare(fake: FakeCublasLt, dtype: torch.dtype, out_dtype: torch.dtype) -> Product:
    product = library_of(fake).prepare(Problem(*SHAPE, dtype, out_dtype), CONFIG)
    assert product is not None
    return product


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = Inputs(0)
    num_tokens, out, size = SHAPE
    weight = inputs.normal(out, size, dtype=dtype, std=size**-0.5)
    return inputs.normal(num_tokens, size, dtype=dtype).cpu(), weight.cpu()


def test_structures_are_as_large_as_the_librarys() -> None:
    assert ctypes.sizeof(Algorithm) == 64
    assert ctypes.sizeof(Candidate) == 96


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("in_float32", [False, True])
def test_a_product_of_matrices_stored_by_rows(
    fake: FakeCublasLt, dtype: torch.dtype, in_float32: bool, add: bool
) -> None:
    out_dtype = torch.float32 if in_float32 else dtype
    (x, weight), product = data(dtype), prepare(fake, dtype, out_dtype)
    before = Inputs(1).normal(*SHAPE[:2], dtype=out_dtype).cpu()
    y = before.clone() if add else poisoned(before.shape, out_dtype)
    product(x, weight, y, add)
    expected = x.double() @ weight.double().T + (before.double() if add else 0)
    expect_close("y", y, expected, close(out_dtype, "elementwise"))


def test_an_algorithm_is_rebuilt_from_its_numbers(fake: FakeCublasLt) -> None:
    library, problem = library_of(fake), Problem(*SHAPE, torch.float16, torch.float16)
    assert gemm_search.config_of(library, library.algorithm(problem, CONFIG)) == CONFIG
    assert library.functions.version() == "13.1.2"


def test_a_call_is_one_call_of_the_library(fake: FakeCublasLt) -> None:
    product = prepare(fake, torch.bfloat16, torch.bfloat16)
    (x, weight), y = data(torch.bfloat16), torch.empty(SHAPE[:2], dtype=torch.bfloat16)
    fake.counts.clear()
    for _ in range(3):
        product(x, weight, y)
    assert fake.counts == {"Matmul": 3}


def test_descriptions_live_as_long_as_their_product(fake: FakeCublasLt) -> None:
    library, problem = library_of(fake), Problem(*SHAPE, torch.float16, torch.float16)
    fake.refused = (PROPOSED[0],)
    product = library.prepare(problem, CONFIG)
    assert library.prepare(problem, PROPOSED[0]) is None
    gemm_search.proposals(library, problem)
    assert fake.num_objects() == 4
    del product
    assert fake.num_objects() == 0


def test_a_workspace_is_as_large_as_the_algorithm_says(fake: FakeCublasLt) -> None:
    (x, weight), y = data(torch.float16), torch.empty(SHAPE[:2], dtype=torch.float16)
    for fake.workspace_size in (0, 4096):
        prepare(fake, torch.float16, torch.float16)(x, weight, y)
    assert fake.workspaces[0] == (None, 0)
    address, size = fake.workspaces[1]
    assert address
    assert size == 4096


def test_what_the_library_does_not_have_is_none(fake: FakeCublasLt) -> None:
    fake.refused = (CONFIG,)
    library, problem = library_of(fake), Problem(*SHAPE, torch.float16, torch.float16)
    assert library.prepare(problem, CONFIG) is None
    assert library.prepare(problem, CONFIG._replace(algo_id=3)) is None
    assert library.prepare(problem, CONFIG._replace(custom_option=0)) is not None


def test_a_failed_call_raises_with_the_status(fake: FakeCublasLt) -> None:
    fake.matmul_status = 13
    (x, weight), y = data(torch.float16), torch.empty(SHAPE[:2], dtype=torch.float16)
    product = prepare(fake, torch.float16, torch.float16)
    with pytest.raises(CublasLtError, match="cublasLtMatmul: cuBLAS status 13"):
        product(x, weight, y)


def test_memory_that_the_algorithm_does_not_take(fake: FakeCublasLt) -> None:
    (x, weight), y = data(torch.float16), torch.empty(SHAPE[:2], dtype=torch.float16)
    product = prepare(fake, torch.float16, torch.float16)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x)
    fake.counts.clear()
    assert not product(moved, weight, y)
    assert not product(x, weight.T.contiguous().T, y)
    assert not product(x, weight, torch.empty(SHAPE[0], 32, dtype=y.dtype)[:, :24])
    assert not fake.counts
    assert product(x, weight, y)


@pytest.mark.parametrize("version", [None, "99.0"])
def test_without_the_library_there_is_none(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert cublas_lt_api.load() is None
    assert cublas_lt.library.__wrapped__(torch.device("cuda", 0)) is None


def test_the_search_goes_from_proposals_to_what_is_near_the_best(fake: FakeCublasLt) -> None:
    """Nothing but tile 3 in two parts is fast, with option 2 in a cluster of number 6."""
    library, problem = library_of(fake), Problem(*SHAPE, torch.float16, torch.float16)
    asked: list[Config] = []

    def measure(configs: list[Config]) -> dict[Config, float]:
        asked.extend(configs)
        return {config: time(config) for config in configs if config.cluster_shape_id != 9}

    def time(config: Config) -> float:
        return 10.0 - sum(a == b for a, b in zip(facts(config), (3, 2, 2, 6)))

    def facts(config: Config) -> tuple[int, ...]:
        return config.tile_id, config.splitk_num, config.custom_option, config.cluster_shape_id

    times = gemm_search.search(library, problem, None, measure)
    (best,) = gemm_search.best(times, 1)
    assert facts(best) == (3, 2, 2, 6)
    assert asked[0] == PROPOSED[0]
    assert len(asked) == len(set(asked))
    assert all(config.sums_in_float32 for config in asked)
    asked.clear()
    gemm_search.search(library, problem, [CONFIG], measure)
    assert asked[:2] == [PROPOSED[0], CONFIG]
    assert {config.tile_id for config in asked} == {PROPOSED[0].tile_id, CONFIG.tile_id}
