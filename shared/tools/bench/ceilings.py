"""Measures the device's two ceilings: memory bandwidth and GEMM rate."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

import torch

from diptych.shared.config import ModelConfig
from diptych.shared.engine.build.settings import default_device
from diptych.shared.tools.bench.step_cost import Ceilings

MIB = 2**20
READ_BYTES = {"cuda": 4096 * MIB, "cpu": 256 * MIB, "mps": 512 * MIB}
"""Many times the size of any cache."""
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024, "mps": 4096}
NUM_RUNS = 10


def device_and_dtype(flags: dict[str, Any], config: ModelConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of an engine with these flags. Ceilings are measured before the engine takes the
    memory."""
    device = torch.device(flags.get("device") or default_device())
    name = flags.get("dtype", "auto")
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return device, dtype
    return device, torch.float32 if device.type == "cpu" else config.dtype


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the ceilings of this device, with GEMM in this dtype."""
    ceilings = Ceilings(_bandwidth(device), _matrix_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def ceilings_before_engine(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """On a GPU by a process that ends: what its libraries keep would be missing on rank 0 alone."""
    if device.type != "cuda":
        return measure_ceilings(device, dtype)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure_ceilings, device, dtype).result()


def _bandwidth(device: torch.device) -> float:
    """The better of a copy (bytes read and written) and of a sum (bytes read)."""
    num_bytes = READ_BYTES[device.type]
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_time = median_time(lambda: target.copy_(source), device)
    return max(2 * num_bytes / copy_time, num_bytes / median_time(lambda: torch.sum(source), device))


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a GEMM of two random square matrices."""
    n = MATRIX_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / median_time(lambda: a @ b, device)


def median_time(call: Callable[[], object], device: torch.device, num_runs: int = NUM_RUNS) -> float:
    """Median seconds of one call, after two warm-up calls."""
    for _ in range(2):
        call()
    return statistics.median(call_times(call, device, num_runs))


def call_times(
    call: Callable[[], object],
    device: torch.device,
    num_runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds from the end of one call to the end of the next, without pauses. On a GPU the CPU runs ahead,
    so CPU time is hidden unless it exceeds the device's."""
    if device.type != "cuda":
        marks = [clock()]
        for _ in range(num_runs):
            call()
            if device.type == "mps":
                torch.mps.synchronize()
            marks.append(clock())
        return [end - start for start, end in pairwise(marks)]
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num_runs + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairwise(events)]


def launch_times(
    call: Callable[[], object],
    device: torch.device,
    num_runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of CPU time for each call, on an idle device: behind many calls the CPU would also wait for a
    place in the launch queue."""
    times = []
    for _ in range(num_runs):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
        start = clock()
        call()
        times.append(clock() - start)
    return times
