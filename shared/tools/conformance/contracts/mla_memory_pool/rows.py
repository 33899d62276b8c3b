"""Clauses of MLATokenToKVPool: one row for each slot, which includes V."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.interfaces import MLATokenToKVPool
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.contracts.memory_pool.fp8_pool import (
    IN_TYPES,
    awkward_numbers,
    nearest_fp8,
)
from diptych.shared.tools.conformance.contracts.memory_pool.kv_pool import slots
from diptych.shared.types.attention import KVScales

SIZE, PAGE_SIZE, NUM_LAYERS, KV_LORA_RANK, ROPE_HEAD_DIM = 16, 4, 3, 10, 6
ROW_SIZE = KV_LORA_RANK + ROPE_HEAD_DIM
POOL_TYPES = grid("{dtype}", dtype=FLOAT_TYPES)


def mla_pool(
    impl: Any, dtype: torch.dtype = torch.float32, kv_scales: list[KVScales] | None = None
) -> MLATokenToKVPool:
    """A pool with distinct numbers in every slot of every layer."""
    sizes = SIZE, PAGE_SIZE, NUM_LAYERS, KV_LORA_RANK, ROPE_HEAD_DIM
    pool: MLATokenToKVPool = impl(*sizes, dtype, check_device(), kv_scales)
    inputs = Inputs(seed=0)
    for layer_id in range(NUM_LAYERS):
        pool.k_buffer(layer_id).copy_(inputs.normal(SIZE + PAGE_SIZE, 1, ROW_SIZE))
    return pool


def rows(pool: MLATokenToKVPool) -> list[torch.Tensor]:
    return [pool.k_buffer(layer_id).clone() for layer_id in range(NUM_LAYERS)]


def expect_rows(what: str, pool: MLATokenToKVPool, expected: list[torch.Tensor]) -> None:
    for layer_id, wanted in enumerate(expected):
        expect_equal(f"{what}: K of layer {layer_id}", pool.k_buffer(layer_id), wanted)
        expect_equal(f"{what}: V of layer {layer_id}", pool.v_buffer(layer_id), wanted[..., :KV_LORA_RANK])


@contract("V is the first kv_lora_rank columns of K and shares its memory.", POOL_TYPES)
def v_is_a_view(impl: Any, case: Case) -> None:
    pool = mla_pool(impl, case.dtype)
    k, v = pool.k_buffer(1), pool.v_buffer(1)
    expect_equal("K's shape", tuple(k.shape), (SIZE + PAGE_SIZE, 1, ROW_SIZE))
    expect_equal("V's shape", tuple(v.shape), (SIZE + PAGE_SIZE, 1, KV_LORA_RANK))
    expect_true("V begins where K does", v.data_ptr() == k.data_ptr() and v.stride() == k.stride())
    expected = rows(pool)
    k[7] = 1.5
    expected[1][7] = 1.5
    expect_rows("written through K", pool, expected)


@contract("store writes the rows of one layer, cast to the pool's dtype, and does not read v.", POOL_TYPES)
def store(impl: Any, case: Case) -> None:
    pool, inputs = mla_pool(impl, case.dtype), Inputs(seed=1)
    new = inputs.normal(3, 1, ROW_SIZE)
    expected = rows(pool)
    expected[2][slots(9, 4, 19)] = new.to(case.dtype)
    pool.store(2, slots(9, 4, 19), new, torch.full_like(new[..., :KV_LORA_RANK], torch.nan))
    expect_rows("after store", pool, expected)


@contract(
    "An FP8 pool stores rows over the layer's scale, clamped and rounded; the rows given stay as they are.",
    IN_TYPES,
)
def fp8_stores_quotients(impl: Any, case: Case) -> None:
    scales = [KVScales(scale, scale) for scale in (0.37, 0.02, 8.0)]
    pool, stored_type = mla_pool(impl, case.pool_dtype, scales), case.pool_dtype
    expect_equal("num_bytes_per_token", pool.num_bytes_per_token, NUM_LAYERS * ROW_SIZE)
    for layer_id, (scale, _) in enumerate(scales):
        given = awkward_numbers((3, 1, ROW_SIZE), case.dtype, scale, layer_id, stored_type)
        new = given.to(check_device())
        pool.store(layer_id, slots(9, 4, 19), new, torch.full_like(new[..., :KV_LORA_RANK], torch.nan))
        expected = nearest_fp8((given.to(torch.float32) / scale).to(torch.float64), stored_type)
        stored = pool.k_buffer(layer_id).to(torch.float64)[slots(9, 4, 19)].cpu()
        expect_equal(f"rows of layer {layer_id}", stored, expected)
        expect_equal("rows as given", new.cpu(), given)


@contract("move copies rows as if all sources were read before any target is written.", EXAMPLE)
def move(impl: Any, case: Case) -> None:
    pool = mla_pool(impl)
    expected = rows(pool)
    for layer in expected:
        layer[[4, 5, 6]] = layer[[5, 6, 4]]
    pool.move(slots(4, 5, 6), slots(5, 6, 4))
    expect_rows("after move", pool, expected)


@contract("num_bytes_per_token counts a row once, over all layers.", POOL_TYPES)
def bytes_per_token(impl: Any, case: Case) -> None:
    pool = mla_pool(impl, case.dtype)
    expect_equal("num_bytes_per_token", pool.num_bytes_per_token, NUM_LAYERS * ROW_SIZE * case.dtype.itemsize)
