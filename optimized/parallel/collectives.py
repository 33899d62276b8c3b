"""Collectives of CUDA tensors over NCCL and our one-shot kernel, of CPU tensors over gloo.

Differs from reference: one operation of the library instead of a gather and a sum. A sum is rounded to the
tensor's dtype at each addition. Small sums of GPUs of one computer are one kernel (symmetric_memory.py), in
float32 and in the order of ranks, with the residual and the norm behind them if a layer asks for that. So are
a small reduce-scatter, and a small all-gather of int32, in which rows of several dtypes are packed.
Operations on CUDA tensors are queued on the current stream, and a CUDA graph may contain them; all of a group
must run one after the other. Communicator and buffers are made at the first CUDA tensor, which takes time and
memory, so use each group once before memory is measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from diptych.optimized.parallel.symmetric_memory import connect_one_shot, uses_one_shot
from diptych.shared.interfaces import collectives as interface
from diptych.shared.parallel.collective_log import CollectiveLog
from diptych.shared.parallel.meeting import gloo_group, use_loopback
from diptych.shared.parallel.patience import LONGEST, introduce, meet

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store, Work

    from diptych.optimized.kernels.collectives.one_shot_all_reduce import OneShotAllReduce
    from diptych.shared.interfaces import RMSNorm

T = TypeVar("T")


class Collectives(interface.Collectives):
    has_one_shot = True

    def __init__(self, store: Store, rank: int, size: int, seconds: float, name: str = "tp") -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.log = CollectiveLog()
        self._store = store
        self._limit = timedelta(seconds=seconds)
        self._meetings = count()
        self._groups: dict[str, Any] = {}  # type of device -> its process group
        self._one_shot: OneShotAllReduce | None = None  # of CUDA tensors
        introduce(store, rank)
        self._group(torch.device("cpu"))

    def leave(self) -> None:
        self._groups.clear()  # gloo's: `rejoin` is for CPU tensors
        self.is_broken = True

    def rejoin(self, store: Store, rank: int, size: int, seconds: float) -> None:
        group = self._groups["cpu"] = gloo_group(store, rank, size, timedelta(seconds=seconds))
        group.set_timeout(self._limit)
        self._store, self.rank, self.size, self.is_broken = store, rank, size, False
        introduce(store, rank)
        self.log.clear()

    # --8<-- [start:all-reduce]
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add("all_reduce", self.name, x)
        if self._takes_one_shot(x) and self._one_shot is not None:
            return self._launched(self._one_shot(x.contiguous()))
        total = x.clone(memory_format=torch.contiguous_format)
        self._finish(x, "allreduce", [total])
        return total

    # --8<-- [end:all-reduce]

    def all_reduce_add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from diptych.optimized.layers import GemmaRMSNorm, adds_in_kernel

        is_even = x.shape[-1] % 2 == 0
        if not (is_even and self._takes_one_shot(x) and adds_in_kernel(norm)) or self._one_shot is None:
            return super().all_reduce_add_and_norm(x, residual, norm)
        self.log.add("all_reduce_add_and_norm", self.name, x)
        is_gemma = isinstance(norm, GemmaRMSNorm)
        normed = self._one_shot.add_rms_norm(x.contiguous(), residual, norm.weight, norm.eps, is_gemma)
        return self._launched(normed)

    def _takes_one_shot(self, x: torch.Tensor, num_times: float = 1) -> bool:
        """As `_is_small`, for tensors that the kernel adds."""
        return (
            self._is_small(x, num_times) and self._one_shot is not None and x.dtype in self._one_shot.dtypes
        )

    def _is_small(self, x: torch.Tensor, num_times: float) -> bool:
        """The same on all ranks: they pass tensors of one shape, dtype and type of device. num_times: of the
        bytes of x, which a sum has for which NCCL sends as much."""
        if not x.is_cuda:
            return False
        self._group(x.device)
        return uses_one_shot(int(num_times * x.numel() * x.element_size()), self.size)

    def barrier(self) -> None:
        """A rank may come as late as it likes while it works: before the first steps ranks compile kernels,
        which takes minutes, and one of them may take longer than the others."""
        name = f"{self.name} barrier {next(self._meetings)}"
        meet(self._store, name, self.rank, self.size, self._limit.total_seconds())

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add("all_gather", self.name, x)
        if x.dtype == torch.int32 and self._is_small(x, 2) and self._one_shot is not None:
            return self._launched(self._one_shot.gather(x.contiguous()))
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._finish(x, "_allgather_base", gathered, x.contiguous())
        return gathered

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add("reduce_scatter", self.name, x)
        if self._takes_one_shot(x, 2 / self.size) and self._one_shot is not None:
            return self._launched(self._one_shot.reduce_scatter(x.contiguous()))
        part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        self._finish(x, "_reduce_scatter_base", part, x.contiguous())
        return part

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        self.log.add("all_to_all", self.name, x, any_rows=True)
        received = x.new_empty(sum(receive_counts), *x.shape[1:])
        self._finish(x, "alltoall_base", received, x.contiguous(), list(receive_counts), list(send_counts))
        return received

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.log.add("broadcast", self.name, x)
        received = x.clone(memory_format=torch.contiguous_format)
        self._finish(x, "broadcast", received, source)
        return received

    def send(self, x: torch.Tensor, to: int) -> None:
        self._finish(x, "send", [x.contiguous()], to, 0)

    def start_send(self, x: torch.Tensor, to: int) -> Work:
        """`send` that returns immediately. x, which is contiguous, must not be overwritten until the work is
        completed."""
        sent: Work = self._group(x.device).send([x], to, 0)
        return sent

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._finish(like, "recv", [received], source, 0)
        return received

    def start_receive(self, received: torch.Tensor, source: int) -> Work:
        """Receive into a contiguous tensor, which is there when the work is completed."""
        work: Work = self._group(received.device).recv([received], source, 0)
        return work

    def beside(self, name: str) -> NcclCollectives:
        """Another group of the same ranks, whose operations do not wait for those of this one."""
        return NcclCollectives(self._store, self.rank, self.size, self._limit.total_seconds(), name)

    def _launched(self, result: T) -> T:
        """The result of a kernel on the current stream, behind which others may be launched."""
        if self.meanwhile is not None:
            self.meanwhile()
        return result

    def _finish(self, x: torch.Tensor, operation: str, *args: object) -> None:
        """Run the operation: on a CPU to its end; on a GPU, later work of the current stream waits for it."""
        run: Callable[..., Work] = getattr(self._group(x.device), operation)
        try:
            work = run(*args)
            if self.meanwhile is not None:
                self.meanwhile()
            work.wait()
        except RuntimeError:
            self.is_broken = True
            raise

    def _group(self, device: torch.device) -> Any:
        if device.type not in self._groups:
            self._groups[device.type] = self._connect(device)
        return self._groups[device.type]

    def _connect(self, device: torch.device) -> Any:
        from torch import distributed

        store = distributed.PrefixStore(f"{self.name}/{device.type}", self._store)
        if device.type == "cpu":
            return gloo_group(store, self.rank, self.size, self._limit)
        use_loopback()
        self.barrier()
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=LONGEST)  # a rank may compile behind an operation of the others
        nccl = distributed.ProcessGroupNCCL(store, self.rank, self.size, options)
        # The end of a communicator waits for the other ranks, which may be waiting for this one's last call.
        weakref.finalize(self, nccl.abort)
        if self.has_one_shot:
            store = distributed.PrefixStore("one-shot", store)
            self._one_shot = connect_one_shot(store, self.rank, self.size, nccl, device)
        return nccl


class NcclCollectives(Collectives):
    """Every sum of CUDA tensors is NCCL's."""

    has_one_shot = False
