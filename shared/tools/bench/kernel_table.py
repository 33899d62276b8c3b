"""Breaks down the time of a step: by kernel on a GPU, by operator on a CPU, with readable names."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

NUM_STEPS = 8
"""Without a pause between them: CPU work is hidden as in the engine, and the gap before the first kernel,
which is not recorded, does not matter."""

IDLE = "idle"
NAME_LEN = 64


_CUBLAS = re.compile(r"nvjet_|sm\d+_xmma_|gemm|gemv|cublas|splitK")


class KernelTime(NamedTuple):
    """`seconds` and `num_calls` in one step. IDLE: no kernel ran. A kernel that starts while another runs
    (many start early and wait) counts from the end of the other, so the rows add up to the step."""

    name: str
    num_calls: float
    seconds: float


def profile_kernels(step: Callable[[], object], device: torch.device) -> list[KernelTime]:
    """One row for each name, the longest time first, then idle time. Kernels launched by a CUDA graph count
    too."""
    if device.type != "cuda":
        return _profile_operators(step)
    _run(step, device, ProfilerActivity.CUDA, 1)  # the first use of the profiler is slow
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        _run(step, device, ProfilerActivity.CUDA, NUM_STEPS).export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    spans = [
        (readable_name(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return kernel_table(spans, NUM_STEPS)


def kernel_table(spans: Iterable[tuple[str, float, float]], num_steps: int) -> list[KernelTime]:
    """(name, start, end) of everything that ran in `num_steps` steps, in microseconds -> rows for one
    step."""
    spans = sorted(spans, key=lambda span: span[1])
    if not spans:
        return []
    sums: dict[str, tuple[int, float]] = {}
    covered_until = spans[0][1]
    for name, start, end in spans:
        calls, total = sums.get(name, (0, 0.0))
        sums[name] = (calls + 1, total + max(0.0, end - max(start, covered_until)))
        covered_until = max(covered_until, end)
    whole = covered_until - spans[0][1]
    rows = [
        KernelTime(name, calls / num_steps, total / num_steps / 1e6) for name, (calls, total) in sums.items()
    ]
    rows.sort(key=lambda row: -row.seconds)
    idle = max(0.0, whole - sum(total for _, total in sums.values()))
    return [*rows, KernelTime(IDLE, 0, idle / num_steps / 1e6)]


def readable_name(kernel: str) -> str:
    """A kernel's name without types and template arguments. A generic kernel of torch gets the name of the
    operation inside it."""
    if kernel.startswith(("Memcpy", "Memset")):
        return kernel
    inner = re.findall(r"at::native::(?:\(anonymous namespace\)::)?(\w+)", kernel)
    generic = ("elementwise", "vectorized", "unrolled", "index_kernel", "reduce_kernel", "gpu_")
    special = [name for name in inner if not name.startswith(generic)]
    if inner and special and special[0] != inner[0]:
        return f"{inner[0]}: {special[0]}"[:NAME_LEN]
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name.partition("<")[0].partition("(")[0].strip()
    if _CUBLAS.match(name):
        name = f"cuBLAS: {name}"
    return name[:NAME_LEN] or kernel[:NAME_LEN]


def _run(step: Callable[[], object], device: torch.device, activity: ProfilerActivity, num_steps: int) -> Any:
    with profile(activities=[activity]) as profiler:
        for _ in range(num_steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return profiler


def _profile_operators(step: Callable[[], object]) -> list[KernelTime]:
    """Rows by each operator's own time, without the operators that it calls. IDLE is the time of Python and
    of the profiler."""
    times: list[float] = []

    def timed() -> None:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)

    for _ in range(2):  # the first use of the profiler is slow
        profiler = _run(timed, torch.device("cpu"), ProfilerActivity.CPU, 1)
    rows = [
        KernelTime(str(each.key), each.count, each.self_cpu_time_total / 1e6)
        for each in profiler.key_averages()
        if each.self_cpu_time_total > 0
    ]
    rows.sort(key=lambda row: -row.seconds)
    return [*rows, KernelTime(IDLE, 0, max(0.0, times[-1] - sum(row.seconds for row in rows)))]
