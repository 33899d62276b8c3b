"""GEMM of tokens and a weight whose rows are output channels."""

from __future__ import annotations

from functools import partial

import torch

from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, bytes_of

GEMMS: tuple[Case, ...] = table(
    "num_tokens out size dtype",
    *(
        (*sizes, dtype)
        for dtype in FLOAT_TYPES
        for sizes in (
            (1, 64, 256),
            (5, 63, 127),
            (17, 160, 640),
            (33, 80, 272),
            (130, 129, 512),
            (3, 64, 4096),
        )
    ),
    name="{num_tokens} x {out} x {size}, {dtype}",
)


def timed_gemms(device: str) -> tuple[Case, ...]:
    on_gpu = device == "cuda"
    counts, size = ((1, 16, 128, 1024, 8192), 4096) if on_gpu else ((1, 16, 128), 512)
    rows = ((n, size, size, torch.bfloat16 if on_gpu else torch.float32) for n in counts)
    return table("num_tokens out size dtype", *rows, name=f"{{num_tokens}} x {size} x {size}")


def make_gemm(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """a [num_tokens, size], b [out, size] of variance 1 / size. out = a @ b.T [num_tokens, out]."""
    inputs = Inputs(seed)
    a = inputs.normal(case.num_tokens, case.size, dtype=case.dtype)
    b = inputs.normal(case.out, case.size, dtype=case.dtype, std=case.size**-0.5)
    num_bytes = bytes_of(a, b) + case.num_tokens * case.out * a.element_size()
    return Problem(
        case.name, {"a": a, "b": b}, {}, product, "gemm", case.dtype, case.num_tokens, num_bytes,
        2.0 * case.num_tokens * case.out * case.size, partial(torch.mm, a, b.T),
    )  # fmt: skip


def product(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    a, b = problem["a"].cpu().double(), problem["b"].cpu().double()
    if mistake == "rounded":
        a, b = a.bfloat16().double(), b.bfloat16().double()
    if mistake == "not transposed":
        return {"out": a @ b if len(b) == b.shape[1] else torch.full((len(a), len(b)), torch.nan)}
    end = {"last of K": -1}.get(mistake, a.shape[1])
    return {"out": a[:, :end] @ b[:, :end].T}


SUSPECTS = {
    "the last element of each sum is left out": partial(product, mistake="last of K"),
    "inputs are rounded to bfloat16": partial(product, mistake="rounded"),
    "b is not transposed": partial(product, mistake="not transposed"),
}

GEMM_LIKE = Like(
    "gemm", "GEMM of tokens and a weight: a @ b.T.", "tokens", GEMMS, timed_gemms, make_gemm, SUSPECTS,
    sparse="a", rows=("a",), beside="torch",
)  # fmt: skip
