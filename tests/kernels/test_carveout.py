"""What a kernel asks for as first-level cache: by the driver's own account, and once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from diptych.optimized.kernels import carveout
from diptych.optimized.kernels.linear import cta_gemv, warp_gemv
from diptych.optimized.kernels.portable import Gpu
from diptych.shared.tools.conformance.clauses.device import check_device


@triton.jit
def _fill_kernel(y_ptr, SIZE: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, SIZE), 1.0)


class Driver:
    """Keeps what it is asked."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.asked: list[tuple[int | None, int, int]] = []

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.asked.append((function.value, attribute, value))
        return self.error


def launched(function: int) -> SimpleNamespace:
    """What a launch returns."""
    return SimpleNamespace(function=function, metadata=SimpleNamespace(shared=512))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """In place of the GPU's, as if there were one."""
    driver = Driver()
    monkeypatch.setattr(carveout, "_driver", lambda: driver)
    monkeypatch.setattr(carveout, "INTERPRETED", False)
    monkeypatch.setattr(carveout, "gpu_of", lambda device: Gpu((9, 0), 132, 227 * 1024))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    carveout._ask.cache_clear()
    yield driver
    carveout._ask.cache_clear()


def test_each_kernel_asks_once(driver: Driver) -> None:
    for function in (11, 12, 11, 12, 12):
        carveout.prefer_l1(launched(function))
    assert driver.asked == [(11, carveout.CARVEOUT, 0), (12, carveout.CARVEOUT, 0)]


def test_room_for_ctas(driver: Driver) -> None:
    """In percent of 228 KB, rounded up: each CTA has its own shared memory and 1 KB of the system's."""
    for function, num_ctas in enumerate((1, 8, 150)):
        carveout.prefer_l1(launched(function), num_ctas)
    assert [percent for _, _, percent in driver.asked] == [1, 6, 99]


def test_room_on_a_gpu_with_less_shared_memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carveout, "gpu_of", lambda device: Gpu((8, 9), 128, 99 * 1024))
    carveout.prefer_l1(launched(20), 8)
    assert driver.asked == [(20, carveout.CARVEOUT, 12)]


def test_a_driver_that_refuses_is_heard(driver: Driver) -> None:
    driver.error = 400
    with pytest.warns(RuntimeWarning, match="kernels stay slow: .* CUDA error 400"):
        carveout.prefer_l1(launched(13))


def test_elsewhere_the_driver_is_not_asked(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)  # as on an AMD GPU
    carveout.prefer_l1(launched(14))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(carveout, "INTERPRETED", True)
    carveout.prefer_l1(None)  # all that the interpreter returns
    assert driver.asked == []


@pytest.mark.parametrize("kernel", [warp_gemv.warp_gemv, cta_gemv.cta_gemv], ids=["warp_gemv", "cta_gemv"])
def test_gemvs_ask(kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[object] = []
    for module in (warp_gemv, cta_gemv):
        monkeypatch.setattr(module, "prefer_l1", launches.append)
    x, weight = (torch.ones(n, 64, device=check_device()) for n in (1, 128))
    y = torch.empty(1, 128, device=check_device())
    kernel(x, weight, y)
    assert y.eq(64).all()
    assert len(launches) == 1


@pytest.mark.gpu
def test_the_driver_knows_it() -> None:
    y = torch.zeros(64, device="cuda")
    kernel = _fill_kernel[(1,)](y, SIZE=64)
    before = _carveout_of(kernel.function)
    carveout.prefer_l1(kernel)
    assert (before, _carveout_of(kernel.function)) == (-1, 0)
    _fill_kernel[(1,)](y, SIZE=64)
    assert y.eq(1).all()


def _carveout_of(function: int) -> int:
    value = ctypes.c_int(-2)
    library = ctypes.CDLL("libcuda.so.1")
    error = library.cuFuncGetAttribute(ctypes.byref(value), carveout.CARVEOUT, ctypes.c_void_p(function))
    assert error == 0
    return value.value
