"""Ranks with a process and a GPU each, and what tests run on them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diptych.optimized.kernels.linear.rms_norm import add_partial_sums_rms_norm
from diptych.optimized.layers import RMSNorm
from diptych.optimized.parallel.collectives import Collectives, NcclCollectives
from diptych.optimized.parallel.symmetric_memory import one_shot_limit
from diptych.shared.engine.processes.child import Child, Inbox, reported_end, started
from diptych.shared.engine.processes.child_messages import Ready
from diptych.shared.parallel.channel import Channel
from diptych.shared.parallel.meeting import local_store, open_store

SECONDS = 120.0
NUM_REPLAYS = 10_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_gpus(size: int, function: Callable[..., Any]) -> list[Any]:
    """`function` of this file with the group of each rank; the results in the order of ranks."""
    store = local_store(size)
    children = [Child.spawn(f"rank {rank}", _run, function, rank, size, store.path) for rank in range(size)]
    try:
        with started(children):
            return [pickle.loads(child.next_message(2 * SECONDS)) for child in children]
    finally:
        for child in children:
            child.end()


def _run(function: Callable[..., Any], rank: int, size: int, path: str, pipe: Channel) -> None:
    inbox = Inbox(pipe, list)
    with reported_end(inbox), torch.inference_mode():
        torch.cuda.set_device(rank)
        store = open_store(path, size)
        tp = Collectives(store, rank, size, SECONDS)
        result = function(tp, NcclCollectives(store, rank, size, SECONDS, "nccl"))
        torch.cuda.synchronize()
        tp.barrier()  # no rank frees memory that another reads
        inbox.send(Ready(pickle.dumps(result)))


def random(name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def norm_with(weight: torch.Tensor) -> RMSNorm:
    norm = RMSNorm(len(weight), 1e-6)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """float32, of the parts of all ranks [size, ...]."""
    total = torch.zeros(parts.shape[1:], device=parts.device)
    for part in parts:
        total = total + part.float()
    return total


def sums_that_differ(tp: Collectives, nccl: NcclCollectives) -> list[str]:
    """Sums of the kernel whose bits are not those of the ordered float32 sum, or, of two ranks, of NCCL."""
    found = []
    for dtype in DTYPES:
        most = one_shot_limit(tp.size) // dtype.itemsize
        for num in (1, 7, 63, 2048, 2049, 4096, 100_000, most - 1, most):
            x = random(f"{num} {tp.rank}", num, dtype=dtype)
            total, theirs = tp.all_reduce(x), nccl.all_reduce(x)
            expected = ordered_sum(nccl.all_gather(x[None])).to(dtype)
            if not torch.equal(total, expected):
                found.append(f"{num} of {dtype}: not the ordered sum")
            if tp.size == 2 and not torch.equal(total, theirs):
                found.append(f"{num} of {dtype}: not NCCL's")
    assert tp._one_shot is not None, "the kernel does not run: the GPUs do not reach each other's memory"
    assert nccl._one_shot is None
    return found


def parts_that_differ(tp: Collectives, nccl: NcclCollectives) -> list[str]:
    """Parts of sums, and gathered words, of the kernel whose bits are not the right ones."""
    found = []
    for num in (1, 7, 2049, 100_000, one_shot_limit(tp.size) // 8 + 1):  # the last one is NCCL's
        for dtype in DTYPES:
            x = random(f"{num} {tp.rank}", tp.size * num, 2, dtype=dtype)
            parts = ordered_sum(nccl.all_gather(x[None])).to(dtype).chunk(tp.size)
            if not torch.equal(
                tp.reduce_scatter(x), nccl.reduce_scatter(x) if tp.size == 2 else parts[tp.rank]
            ):
                found.append(f"{num} of {dtype}: not this rank's part")
        words = x.view(torch.int16).to(torch.int32)
        if not torch.equal(tp.all_gather(words), nccl.all_gather(words)):
            found.append(f"{num}: not the words of all ranks")
    return found


def norms(tp: Collectives, nccl: NcclCollectives) -> list[tuple[torch.Tensor, ...]]:
    """(norm, sum) of the kernel, and of the kernel of one GPU on the parts of all ranks."""
    found = []
    for dtype in DTYPES:
        for shape in ((1, 4096), (3, 96), (70, 40), (5, 2560), (16, 8192), (1024, 128)):
            x = random(f"{shape} {tp.rank}", *shape, dtype=dtype)
            norm = norm_with(random("weight", shape[1], dtype=dtype))
            residual = random(f"residual {shape}", *shape, dtype=dtype)
            parts = nccl.all_gather(x[None]).float()
            expected = add_partial_sums_rms_norm(parts, residual.clone(), norm.weight, norm.eps)
            result = tp.all_reduce_add_and_norm(x, residual, norm)
            assert tp.log.entries[-1].op == "all_reduce_add_and_norm"
            found.append(tuple(y.cpu() for y in (*result, *expected)))
    return found


def replays(tp: Collectives, nccl: NcclCollectives) -> tuple[torch.Tensor, int]:
    """The state and a checksum of all states after 10^4 replays of a graph whose sums have various sizes. Its
    input is its last output, so one wrong bit changes all that follows."""
    norm = norm_with(torch.ones(1024, dtype=torch.bfloat16, device="cuda"))
    state = random("state", 4, 1024, dtype=torch.bfloat16)
    own = random(f"weight {tp.rank}", 1024, dtype=torch.bfloat16)
    checksum = torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        for rows in (4, 1, 3):  # launches of other numbers of blocks
            part = (state * own)[:rows].contiguous()
            normed, total = tp.all_reduce_add_and_norm(part, state[:rows].clone(), norm)
            state[:rows].copy_(normed)
            checksum.mul_(31).add_(total.view(torch.int16).long().sum())
        total = tp.all_reduce((state * own).repeat(20, 1))[:4]
        words = tp.all_gather(total[: 1 + tp.size % 2].view(torch.int32))
        checksum.add_(words.long().sum() + tp.all_reduce(tp.reduce_scatter(state.float())).long().sum())
        state.copy_(norm.forward(total))
        state.copy_(nccl.broadcast(state))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        tp.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        for _ in range(NUM_REPLAYS):
            graph.replay()
    torch.cuda.synchronize()
    graph.reset()  # the end of NCCL's communicator waits for it
    return state.cpu(), int(checksum)
