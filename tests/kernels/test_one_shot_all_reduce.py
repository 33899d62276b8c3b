"""The one-shot sum over ranks, between processes that share memory, in Triton's interpreter."""

from __future__ import annotations

import math
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.collectives.one_shot_all_reduce import BLOCK, OneShotAllReduce
from diptych.optimized.kernels.linear.rms_norm import add_partial_sums_rms_norm
from diptych.optimized.kernels.portable import INTERPRETED
from diptych.shared import registry
from tests.changed_modules import Change, changed_files
from tests.planted import Bug, Bugs

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs two GPUs, or processes of the interpreter")
EPS = 1e-6
NUM_WORDS = 4096
"""Of a message; 4 bytes of data each."""
Shape = tuple[int, ...]
"""Of a sum alone (one number), of a sum with a norm: tokens and hidden size, of a part: 1, rows, columns."""


def shared(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that processes which are forked share, at the same address."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=dtype).view(shape)


def random(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(*shape, generator=generator).to(dtype)


def call(all_reduce: OneShotAllReduce, step: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gets, in one row: the sum, or the norm and the new residual."""
    if len(shape) == 3:  # parts to add, the first of which is gathered too, as words
        x = random(f"{step}, rank {all_reduce.rank}", (all_reduce.size * shape[1], shape[2]), dtype)
        words = all_reduce.gather(x[: shape[1]].view(torch.int32))
        return torch.cat((all_reduce.reduce_scatter(x), words.view(dtype))).flatten()
    x = random(f"{step}, rank {all_reduce.rank}", shape, dtype)
    if len(shape) == 1:
        return all_reduce(x)
    residual, weight = random(f"residual {step}", shape, dtype), random("weight", shape[1:], dtype)
    is_gemma = step % 2 == 1
    normed, total = all_reduce.add_rms_norm(x, residual, weight, EPS, is_gemma)
    assert (normed.data_ptr(), total.data_ptr()) == (x.data_ptr(), residual.data_ptr())
    return torch.cat((normed.flatten(), total.flatten()))


def expected(size: int, rank: int, step: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Sum of the parts in the order of ranks; the norm is the kernel of one GPU."""
    if len(shape) == 3:
        _, rows, columns = shape
        each = [random(f"{step}, rank {peer}", (size * rows, columns), dtype) for peer in range(size)]
        total = torch.zeros(size * rows, columns)
        for x in each:
            total = total + x.float()
        own = total.to(dtype)[rank * rows : (rank + 1) * rows]
        return torch.cat([own, *(x[:rows] for x in each)]).flatten()
    parts = torch.stack([random(f"{step}, rank {rank}", shape, dtype).float() for rank in range(size)])
    if len(shape) == 1:
        total = torch.zeros(shape)
        for part in parts:
            total = total + part
        return total.to(dtype)
    residual, weight = random(f"residual {step}", shape, dtype), random("weight", shape[1:], dtype)
    normed, total = add_partial_sums_rms_norm(parts, residual, weight, EPS, unit_offset=step % 2 == 1)
    return torch.cat((normed.flatten(), total.flatten()))


def on_processes(
    size: int,
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    late: Callable[[int, int], float],
    first_step: int = 0,
    impl: Any = OneShotAllReduce,
    seconds: int = 60,
) -> list[list[torch.Tensor]]:
    """What each rank gets in each step; `late`: seconds before a rank's step. Raises `TimeoutError`."""
    inboxes = [shared(2, size, NUM_WORDS, dtype=torch.int64) for _ in range(size)]
    results = [
        [shared((1, 2, 1 + size)[len(shape) - 1] * math.prod(shape), dtype=dtype) for _ in range(size)]
        for shape, dtype in zip(shapes, dtypes)
    ]
    children = []
    for rank in range(size):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout has a handler
                signal.alarm(seconds)
                all_reduce = impl(inboxes, rank)
                all_reduce._steps.fill_(first_step)
                for step, (shape, dtype) in enumerate(zip(shapes, dtypes)):
                    time.sleep(late(rank, step))
                    results[step][rank].copy_(call(all_reduce, step, shape, dtype))
                os._exit(0)
            finally:
                os._exit(1)
    ends = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    if -signal.SIGALRM in ends:
        raise TimeoutError
    assert ends == {0}
    return results


SHAPES: list[Shape] = [
    (1,), (BLOCK,), (3, 96), (1, 1, 2), (BLOCK + 1,), (70, 40), (1, 9, 130), (7,), (2 * BLOCK,), (1, 1000),
    (63,),
]  # fmt: skip


def check(
    size: int,
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    first_step: int = 0,
    impl: Any = OneShotAllReduce,
    seconds: int = 60,
) -> list[tuple[int, int]]:
    """(step, rank) of each result with other bits."""

    def late(rank: int, step: int) -> float:
        return 0.02 * ((step + rank) % size)

    found = on_processes(size, shapes, dtypes, late, first_step, impl, seconds)
    return [
        (step, rank)
        for step, (shape, dtype) in enumerate(zip(shapes, dtypes))
        for rank in range(size)
        if not torch.equal(found[step][rank], expected(size, rank, step, shape, dtype))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_the_ordered_sum_has_the_same_bits_on_all_ranks(size: int, dtype: torch.dtype) -> None:
    """Whichever rank is late, and whatever the sizes of the steps."""
    assert check(size, SHAPES, [dtype] * len(SHAPES)) == []


def test_steps_of_any_dtype_and_past_the_largest_number() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 4
    dtypes = dtypes[: len(SHAPES)]
    assert check(2, SHAPES, dtypes, first_step=2**31 - 4) == []


MODULE = "optimized.kernels.collectives.one_shot_all_reduce"
Changes = Sequence[tuple[str, str]]
"""Of the kernel's text: before and after."""
TOTAL = "total = tl.zeros(x.shape, tl.float32)"


def pause(line: str) -> Changes:
    """Rank 0 waits before it comes to this line."""
    sleep = f"if RANK == 0:\n        time.sleep(0.03)\n    {line}"
    return [("import torch\n", "import time\n\nimport torch\n"), (line, sleep)]


LATE_READER, LATE_WRITER = pause(TOTAL), pause("message = number")
PLANTED = Bugs("one-shot all-reduce", "one_shot_all_reduce", "check_changed")
for _name, _changes in {
    "own part first": [
        (TOTAL, "total = x.to(tl.float32)"),
        ("part = x.to(tl.float32)", "part = tl.zeros(x.shape, tl.float32)"),
    ],
    "no rank waits": [(".to(tl.int32)) > 0:", ".to(tl.int32)) > 1:"), *LATE_WRITER],
    "one half": [("(step & 1) * SIZE", "(step & 0) * SIZE"), *LATE_READER],
    "the steps of other blocks stay": [
        ("exist = start + others < ", "exist = start + others < 0 * "),
        *LATE_WRITER,
    ],
    "the sum is rounded before the residual is added": [
        ("total += residual", "total = rounded(total, dtype).to(tl.float32) + residual")
    ],
    "all peers get one part": [("_data_of(tl.load(x_ptr + peer * n", "_data_of(tl.load(x_ptr + RANK * n")],
    "the own part is the first": [("tl.load(x_ptr + RANK * n", "tl.load(x_ptr + 0 * n")],
    "own rows first": [("tl.store(y_ptr + peer * n", "tl.store(y_ptr + (peer + RANK) % SIZE * n")],
}.items():
    PLANTED.words(_name, MODULE, *((MODULE, *words) for words in _changes))
PLANTED_SHAPES: list[Shape] = [(64, 40), (64 * 40,), (3, 96), (1, 9, 130), (BLOCK + 1,), (70, 40)]
"""The first two have the same words, in one block and in two."""


def check_changed(changes: Changes, seconds: int = 60) -> list[tuple[int, int]]:
    (path,) = changed_files([Change(MODULE, *words) for words in changes]).values()
    changed = registry.load("kernel", f"{path}:OneShotAllReduce")
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    return check(3, PLANTED_SHAPES, dtypes, first_step=2**31 - 3, impl=changed, seconds=seconds)


@PLANTED.found_by(TimeoutError, is_fast=lambda number, _: number <= 1)
def test_a_planted_bug_is_found(bug: Bug) -> dict[str, str]:
    """By other bits, or because a rank waits forever."""
    wrong = check_changed([change[1:] for change in bug.plant.changes], seconds=2)
    return {"check_changed": str(wrong)} if wrong else {}


@pytest.mark.parametrize("changes", [LATE_READER, LATE_WRITER], ids=["reader", "writer"])
def test_a_late_rank_loses_nothing(changes: Changes) -> None:
    assert check_changed(changes) == []


def test_one_rank_and_no_elements() -> None:
    all_reduce = OneShotAllReduce([torch.zeros(2, 1, NUM_WORDS, dtype=torch.int64)], 0)
    x = torch.randn(3, 5)
    assert torch.equal(all_reduce(x), x)
    assert all_reduce(torch.empty(0, 5)).shape == (0, 5)
    assert all_reduce.add_rms_norm(torch.empty(0, 5), torch.empty(0, 5), torch.empty(5), EPS)[0].shape == (
        0,
        5,
    )
    with pytest.raises(AssertionError, match=f"a message has {4 * NUM_WORDS}"):
        all_reduce(torch.zeros(NUM_WORDS + 1))
