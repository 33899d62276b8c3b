"""Clauses of TokenToKVPool: K and V as FP8, with a scale for each layer."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.contracts.memory_pool.kv_pool import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    contents,
    kv_pool,
    slots,
)
from diptych.shared.types.attention import FP8, KVScales

SCALES = [KVScales(0.37, 2.0), KVScales(0.02, 0.9), KVScales(8.0, 0.005)]
E5M2 = torch.float8_e5m2
FINITE = {
    dtype: torch.arange(num, dtype=torch.uint8).view(dtype).to(torch.float64)
    for dtype, num in ((FP8, 127), (E5M2, 124))
}
"""The finite values of each type from 0 on. The parity of a value is that of its index."""
IN_TYPES = (
    *grid("{dtype}", dtype=FLOAT_TYPES, pool_dtype=(FP8,)),
    *grid("{dtype}, e5m2", dtype=FLOAT_TYPES, pool_dtype=(E5M2,)),
)


def nearest_fp8(x: torch.Tensor, dtype: torch.dtype = FP8) -> torch.Tensor:
    """float64 x -> the nearest finite value of a type of `FP8_TYPES`, ties to even."""
    values = FINITE[dtype]
    size = x.abs().clamp(max=float(values[-1]))
    above = torch.searchsorted(values, size).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    takes_high = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return torch.where(takes_high, high, low).copysign(x)


def awkward_numbers(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float, seed: int, pool_dtype: torch.dtype = FP8
) -> torch.Tensor:
    """Numbers that, divided by the scale, lie on and between the values of FP8, below the smallest and beyond
    the largest."""
    values = Inputs(seed).normal(*shape).cpu()
    highest = 4.0 if pool_dtype == FP8 else 6.0
    values *= 10.0 ** torch.linspace(-highest + 1.0, highest, values.numel()).view(values.shape)
    finite = FINITE[pool_dtype]
    ties = (finite[1:] + finite[:-1]) / 2
    values.view(-1)[::3] = ties[: values.view(-1)[::3].numel()].to(torch.float32)
    values.view(-1)[1::16] = 0.0
    return (values * scale).to(dtype)


@contract(
    "An FP8 pool stores k and v over the layer's scales, clamped and rounded; k and v stay as they are.",
    IN_TYPES,
)
def fp8_stores_quotients(impl: Any, case: Case) -> None:
    pool, stored_type = kv_pool(impl, case.pool_dtype, SCALES), case.pool_dtype
    targets = slots(9, 4, 19, 12, 13)
    for layer_id, scales in enumerate(SCALES):
        shape = len(targets), NUM_KV_HEADS, HEAD_DIM
        given = [awkward_numbers(shape, case.dtype, scale, layer_id, stored_type) for scale in scales]
        k, v = (x.to(targets.device) for x in given)
        pool.store(layer_id, targets, k, v)
        buffers = pool.k_buffer(layer_id), pool.v_buffer(layer_id)
        for name, x, before, scale, buffer in zip("KV", (k, v), given, scales, buffers):
            expected = nearest_fp8((before.to(torch.float32) / scale).to(torch.float64), stored_type)
            stored = buffer.to(torch.float64)[targets].cpu()
            expect_equal(f"{name} of layer {layer_id}", stored, expected)
            expect_equal(f"{name} as given", x.cpu(), before)


@contract(
    "An FP8 pool moves what it stores, and takes a byte for each value.",
    (Case("example", pool_dtype=FP8), Case("e5m2", pool_dtype=E5M2)),
)
def fp8_moves_bytes(impl: Any, case: Case) -> None:
    pool = kv_pool(impl, case.pool_dtype, SCALES)
    expect_equal("num_bytes_per_token", pool.num_bytes_per_token, 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM)
    expected = [layer.to(torch.float32) for layer in contents(pool)]
    for layer in expected:
        layer[slots(6, 7, 9)] = layer[slots(7, 6, 15)]
    pool.move(slots(6, 7, 9), slots(7, 6, 15))
    for i, (layer, wanted) in enumerate(zip(contents(pool), expected)):
        what = f"{'KV'[i // NUM_LAYERS]} of layer {i % NUM_LAYERS}"
        expect_equal(what, layer.to(torch.float32), wanted)
