"""Times the sum over ranks (all-reduce), with a process for each rank, for several implementations.

On a CPU these are the collectives of both panels, over gloo. On GPUs, in a CUDA graph: the optimized panel's
collectives, NCCL, torch's one-shot operation over symmetric memory, and our Triton kernel.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from diptych.shared import registry
from diptych.shared.engine.processes.child import Child, Inbox, reported_end, started
from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.channel import Channel
from diptych.shared.parallel.meeting import local_store, open_store
from diptych.shared.tools.bench.ceilings import call_times

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

KIB = 1024
SECONDS = 120.0
"""Time limit of a start and of a sum."""
NUM_WARM_UP = 3
NUM_IN_GRAPH = 20
"""Sums that a CUDA graph holds."""

Sum = Callable[[], torch.Tensor]
Prepare = Callable[[torch.Tensor], Sum | None]
"""This rank's tensor -> a sum of the tensors of all ranks, to be called repeatedly; None: it is too large."""


@dataclass(frozen=True)
class SumsPlan:
    """The same on all ranks. `sizes`: bytes of a tensor."""

    sizes: tuple[int, ...]
    num_ranks: int = 2
    device_type: str = "cpu"
    num_repeats: int = 30

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"ranks must be at least 2, got {self.num_ranks}")
        are_distinct = len(set(self.sizes)) == len(self.sizes)
        if not are_distinct or min(self.sizes) < KIB or any(size % KIB for size in self.sizes):
            raise ValueError(f"sizes must be distinct multiples of {KIB} bytes, got {self.sizes}")
        num_gpus = torch.cuda.device_count()
        if self.device_type not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device_type!r}")
        if self.device_type == "cuda" and num_gpus < self.num_ranks:
            raise ValueError(f"ranks={self.num_ranks}: each needs a GPU, and this computer has {num_gpus}")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device_type == "cuda" else torch.float32


@dataclass(frozen=True)
class SumsResult:
    """One size. `seconds`: of one sum on the slowest rank, median; by implementation."""

    num_bytes: int
    num_ranks: int
    seconds: dict[str, float]
    link: float | None = None  # bytes/s of a rank's links, in one direction

    @property
    def bus_bytes(self) -> float:
        """The bytes that each rank must send, and receive: of all tensors but its own a share, and as much
        of the sums."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes

    @property
    def bound(self) -> float | None:
        """Seconds for `bus_bytes`; None: the link's speed is not given."""
        return None if self.link is None else self.bus_bytes / self.link

    def bus_bandwidth(self, name: str) -> float:
        return self.bus_bytes / self.seconds[name]


def default_device(num_ranks: int) -> str:
    return "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"


def measure(plan: SumsPlan, link: float | None = None) -> Iterator[SumsResult]:
    """One result after another, in the order of sizes. This process is rank 0. Raises `EngineProcessEnded`
    when another rank ends."""
    store = local_store(plan.num_ranks)
    others = [
        Child.spawn(f"rank {rank}", _follow, plan, rank, store.path) for rank in range(1, plan.num_ranks)
    ]
    with started(others):
        for other in others:
            other.next_message(SECONDS)
        for num_bytes, seconds in zip(plan.sizes, time_sums(plan, store, 0)):
            yield SumsResult(num_bytes, plan.num_ranks, seconds, link)


def _follow(plan: SumsPlan, rank: int, path: str, pipe: Channel) -> None:
    """The process of another rank."""
    inbox = Inbox(pipe, list)
    with reported_end(inbox):
        store = open_store(path, plan.num_ranks)
        inbox.start()
        for _ in time_sums(plan, store, rank):
            pass


def time_sums(plan: SumsPlan, store: Store, rank: int) -> Iterator[dict[str, float]]:
    """Seconds by implementation, for each size. All ranks call it. Raises `RuntimeError` for a wrong sum."""
    control = registry.load("collectives", "reference")(store, rank, plan.num_ranks, SECONDS, "control")
    if plan.device_type == "cuda":
        torch.cuda.set_device(rank)
        implementations = _on_gpus(plan, store, rank)
    else:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # the ranks share the cores
        implementations = {
            panel: _of_collectives(_collectives(panel, plan, store, rank)) for panel in registry.PANELS
        }
    device = torch.device(plan.device_type)
    for num_bytes in plan.sizes:
        x = torch.full((num_bytes // plan.dtype.itemsize,), rank + 1.0, dtype=plan.dtype, device=device)
        seconds = {}
        for name, prepare in implementations.items():
            call = prepare(x)
            if call is None:
                continue
            expected = plan.num_ranks * (plan.num_ranks + 1) / 2
            if not torch.all(call() == expected):
                raise RuntimeError(f"{name}: a sum of {num_bytes} bytes over {plan.num_ranks} ranks is wrong")
            own = torch.tensor([_time(call, device, plan.num_repeats, control)], dtype=torch.float64)
            seconds[name] = float(control.all_gather(own).max())
        yield seconds


def _time(call: Sum, device: torch.device, num_repeats: int, control: Collectives) -> float:
    """Seconds of one of successive sums, median. On a GPU they are replayed from a graph."""
    run: Callable[[], object] = call
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UP):
                call()
        torch.cuda.synchronize()
        control.all_reduce(torch.zeros(1))  # no rank captures while another still makes its connections
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(NUM_IN_GRAPH):
                call()
        run = graph.replay
    for _ in range(NUM_WARM_UP):
        run()
    control.all_reduce(torch.zeros(1))
    seconds = statistics.median(call_times(run, device, num_repeats))
    return seconds / NUM_IN_GRAPH if device.type == "cuda" else seconds


def _collectives(panel: str, plan: SumsPlan, store: Store, rank: int) -> Collectives:
    made: Collectives = registry.load("collectives", panel)(store, rank, plan.num_ranks, SECONDS, panel)
    return made


def _of_collectives(group: Collectives) -> Prepare:
    return lambda x: lambda: group.all_reduce(x)


def _on_gpus(plan: SumsPlan, store: Store, rank: int) -> dict[str, Prepare]:
    """All but "optimized" is what the optimized panel would choose from, alone and at every size."""
    from torch.distributed import PrefixStore

    kernel = registry.load_part("one_shot_all_reduce")
    symmetric = registry.load_part("symmetric_memory")
    device = torch.device("cuda", rank)
    nccl = registry.load("collectives", "nccl")(store, rank, plan.num_ranks, SECONDS, "nccl")

    def memory(name: str, dtype: torch.dtype, *shape: int) -> Any:
        where = PrefixStore(name, store)
        group = nccl._group(device)
        return symmetric.SymmetricMemory(where, rank, plan.num_ranks, group, device, dtype, *shape)

    max_bytes = min(max(plan.sizes), kernel.MAX_BLOCKS * kernel.BLOCK * plan.dtype.itemsize)
    inboxes = memory("inboxes", torch.int64, 2, plan.num_ranks, max_bytes // kernel.DATA_BYTES)
    one_shot = kernel.OneShotAllReduce(inboxes.of_ranks, rank)
    one_shot.memory = inboxes  # kept alive

    def torch_one_shot(x: torch.Tensor) -> Sum:
        num_bytes = x.numel() * x.element_size()
        place = memory(f"input of {num_bytes} bytes", x.dtype, x.numel())
        own = place.of_ranks[rank].copy_(x)
        return lambda: torch.ops.symm_mem.one_shot_all_reduce(own, "sum", place._group.group_name)

    def triton_one_shot(x: torch.Tensor) -> Sum | None:
        return None if x.numel() * x.element_size() > max_bytes else lambda: one_shot(x)

    return {
        "optimized": _of_collectives(_collectives("optimized", plan, store, rank)),
        "NCCL": _of_collectives(nccl),
        "torch one-shot": torch_one_shot,
        "Triton one-shot": triton_one_shot,
    }
