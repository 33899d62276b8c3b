"""GEMM for up to 64 tokens, with SwiGLU or the sum with the residual stream; or split-K partial sums, which
the next kernel adds up.

Roofline bound: the weights' bytes, out_features * in_features * itemsize, over the memory's bandwidth.

Shape: a CTA computes some outputs of all tokens, from all columns or, split-K, from a part of them: where
outputs are few, they make too few CTAs, and each CTA reads all of x. No CTA adds up partial sums; a norm that
reads the sum anyway adds them at little cost (rms_norm.py). The tensor cores need 64 rows on one side. With
few tokens these are weights, so that nothing is padding. With more tokens these are the tokens, so that a
CTA may take fewer weights and every multiprocessor has one. For SwiGLU a CTA takes the same rows of gate and
of up. Weights and x are loaded by tensor descriptor where sizes allow it (the copy engine fills shared
memory), in as many stages as a multiprocessor holds. Every CTA reads x again, from the L2 cache: at 64 tokens
these are as many bytes as the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from diptych.optimized.kernels.portable import INTERPRETED, Gpu, gpu_of, pdl_options, rounded

_INTERPRETED = tl.constexpr(INTERPRETED)
MAX_TOKENS = 64
WARPS = 4


class Plan(NamedTuple):
    tokens: int
    rows: int
    """Outputs of a CTA. Fewer than 64: the tokens are the side of 64 rows, so they must be as many."""
    step: int
    """Columns of a tile."""
    stages: int
    parts: int = 1
    """Of the columns."""

    def fitted(self, gated: bool, gpu: Gpu) -> Plan:
        """The tile with fewer stages or fewer columns, if the GPU has too little shared memory."""

        def num_fitting(step: int) -> int:
            return gpu.shared_memory // ((self.tokens + (2 if gated else 1) * self.rows) * step * 2)

        step = self.step
        while step > 64 and num_fitting(step) < min(self.stages, 3):
            step //= 2
        return self._replace(step=step, stages=min(self.stages, num_fitting(step)))


@triton.jit
def tile_of(matrix, row, k, num_rows, size, stride, ROWS: tl.constexpr, STEP: tl.constexpr,
            USE_TMA: tl.constexpr):  # fmt: skip
    """[ROWS, STEP] of a matrix [num_rows, size], zeros beyond it."""
    if USE_TMA:
        tile = matrix.load([row, k])
    else:
        rows, offs_k = row + tl.arange(0, ROWS), k + tl.arange(0, STEP)
        mask = (rows < num_rows)[:, None] & (offs_k < size)[None, :]
        tile = tl.load(matrix + rows.to(tl.int64)[:, None] * stride + offs_k[None, :], mask=mask, other=0.0)
    if _INTERPRETED:  # it cannot multiply bfloat16
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _product(tokens, rows, y, TOKENS_FIRST: tl.constexpr):
    if TOKENS_FIRST:
        return tl.dot(tokens, rows.T, y)
    else:
        return tl.dot(rows, tokens.T, y)


@triton.jit(do_not_specialize=["num_tokens"])
def _tiled_gemm_kernel(
    x, weight, bias_ptr, residual_ptr, y_ptr,
    num_tokens, out, size, part_size, stride_x, stride_weight, stride_residual, stride_y, stride_part,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    USE_TMA: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    num_rows = out * 2 if GATED else out
    first = tl.program_id(1) * part_size
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    TOKENS_FIRST: tl.constexpr = ROWS < 64
    y = tl.zeros([TOKENS, ROWS] if TOKENS_FIRST else [ROWS, TOKENS], tl.float32)
    up = tl.zeros([TOKENS, ROWS] if TOKENS_FIRST else [ROWS, TOKENS], tl.float32)
    for k in range(first, tl.minimum(first + part_size, size), STEP):
        tokens = tile_of(x, 0, k, num_tokens, size, stride_x, TOKENS, STEP, USE_TMA)
        tile = tile_of(weight, row, k, num_rows, size, stride_weight, ROWS, STEP, USE_TMA)
        y = _product(tokens, tile, y, TOKENS_FIRST)
        if GATED:
            tile = tile_of(weight, out + row, k, num_rows, size, stride_weight, ROWS, STEP, USE_TMA)
            up = _product(tokens, tile, up, TOKENS_FIRST)
    if GATED:
        # For large negative gates exp(-gate) is infinite and the quotient is 0.
        y = y / (1.0 + tl.exp(-y)) * up

    if not TOKENS_FIRST:
        y = y.T
    offs_t, offs_o = tl.arange(0, TOKENS)[:, None], row + tl.arange(0, ROWS)[None, :]
    mask = (offs_t < num_tokens) & (offs_o < out)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_o, mask=offs_o < out, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offs_t * stride_residual + offs_o, mask=mask, other=0.0).to(tl.float32)
    y_ptr += tl.program_id(1) * stride_part
    tl.store(y_ptr + offs_t * stride_y + offs_o, rounded(y, y_ptr.dtype.element_ty), mask=mask)


def tiled_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> None:
    """y = act(x @ weightᵀ) + bias + residual, rounded once; y may be the residual. x is of a half type.

    x [num_tokens <= MAX_TOKENS, size], y [num_tokens, out]. Gated: weight holds the gate's rows, then as many
    of up, and act is silu(gate) * up. y [parts, num_tokens, out]: its sum over the parts is x @ weightᵀ."""
    num_tokens, size = x.shape
    out = y.shape[-1]
    assert num_tokens <= MAX_TOKENS
    assert weight.shape == ((2 if gated else 1) * out, size)
    assert x.stride(1) == 1 == weight.stride(1) == y.stride(-1)
    assert residual is None or residual.stride(1) == 1
    in_parts = y.dim() == 3
    assert not in_parts or (bias is None and residual is None and not gated)
    measured = Plan(*plan(num_tokens, out, size, gated, in_parts))
    tokens, rows, step, stages, parts = measured.fitted(gated, gpu_of(x.device))
    assert parts == (y.shape[0] if in_parts else 1)
    use_tma = has_descriptors(x, weight)
    _tiled_gemm_kernel[(triton.cdiv(out, rows), parts)](
        TensorDescriptor.from_tensor(x, [tokens, step]) if use_tma else x,
        TensorDescriptor.from_tensor(weight, [rows, step]) if use_tma else weight,
        x if bias is None else bias, x if residual is None else residual, y,
        num_tokens, out, size, triton.cdiv(size, parts * step) * step,
        x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), y.stride(-2),
        y.stride(0) if in_parts else 0,
        TOKENS=tokens, ROWS=rows, STEP=step,
        GATED=gated, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, USE_TMA=use_tma,
        num_warps=WARPS, num_stages=stages, **pdl_options(x),
    )  # fmt: skip


def has_descriptors(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the copy engine can load both: Hopper and later, rows that begin at multiples of 16 bytes."""
    has_engine = INTERPRETED or gpu_of(x.device).is_hopper_or_newer
    return has_engine and all(
        (matrix.data_ptr() | matrix.stride(0) * matrix.element_size()) % 16 == 0 for matrix in (x, weight)
    )


def plan(num_tokens: int, out: int, size: int, gated: bool, in_parts: bool = False) -> Plan:
    """Measured on an H200 in whole layers and steps (docs/lab/gemm.md): mostly as many stages as
    fit a multiprocessor, which then holds one CTA."""
    if in_parts:
        return _plan_in_parts(num_tokens, out, size)
    if num_tokens <= 16:
        return Plan(16, 64, 128, 5) if gated else Plan(16, 64, 256, 5)
    if num_tokens <= 32:
        return Plan(32, 64, 128, 5) if gated else Plan(32, 64, 256, 4)
    if gated:
        return Plan(64, 32, 128, 4)
    if size > 8192 and out <= 4096:  # by 64 outputs they would be 64 CTAs, for 132 multiprocessors
        return Plan(64, 32, 128, 9)
    return Plan(64, 64, 128, 7)


# --8<-- [start:plan-split-k]
def _plan_in_parts(num_tokens: int, out: int, size: int) -> Plan:
    """About as many CTAs as multiprocessors: by outputs as far as tiles are not too
    small, then by parts of 512 columns and more. Each CTA of a part reads x once."""
    tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    if out > 4096:  # by 64 outputs 80 CTAs for Qwen3-14B's: three times as many are two waves
        return Plan(tokens, 64, 128, 7, 3 if num_tokens > 32 and size > 8192 else 1)
    rows = 32 if num_tokens > 32 and out <= 2048 else 64
    parts = min(128 * rows // out, size // 512, 4)
    return Plan(tokens, rows, 256, 4 if rows == 32 or out <= 1024 else 3, max(parts, 1))


# --8<-- [end:plan-split-k]


def num_parts(num_tokens: int, out: int, size: int) -> int:
    """The best number of split-K parts of a GEMM whose sum a norm adds up."""
    return plan(num_tokens, out, size, False, in_parts=True).parts
