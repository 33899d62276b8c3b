"""Clauses of TokenToKVPool: K and V of every slot."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.interfaces import TokenToKVPool
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison
from diptych.shared.types.attention import KVScales

SIZE, PAGE_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 16, 4, 3, 2, 8
NUM_SLOTS = SIZE + PAGE_SIZE


POOL_TYPES = grid("{dtype}", dtype=FLOAT_TYPES)


def kv_pool(
    impl: Any, dtype: torch.dtype = torch.float32, kv_scales: list[KVScales] | None = None
) -> TokenToKVPool:
    """A pool with distinct numbers in every slot of every layer."""
    pool: TokenToKVPool = impl.TokenToKVPool(
        SIZE, PAGE_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype, check_device(), kv_scales
    )
    inputs = Inputs(seed=0)
    for layer_id in range(NUM_LAYERS):
        for buffer in (pool.k_buffer, pool.v_buffer):
            buffer(layer_id).copy_(inputs.normal(NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM))
    return pool


def contents(pool: TokenToKVPool) -> list[torch.Tensor]:
    """Copies of K of all layers, then V."""
    return [
        buffer(layer_id).clone()
        for buffer in (pool.k_buffer, pool.v_buffer)
        for layer_id in range(NUM_LAYERS)
    ]


def expect_contents(what: str, pool: TokenToKVPool, expected: list[torch.Tensor]) -> None:
    for i, (actual, wanted) in enumerate(zip(contents(pool), expected)):
        expect_equal(f"{what}: {'KV'[i // NUM_LAYERS]} of layer {i % NUM_LAYERS}", actual, wanted)


def slots(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=check_device())


@contract("k_buffer and v_buffer are views of [size + page_size, num_kv_heads, head_dim].", POOL_TYPES)
def buffers_are_views(impl: Any, case: Case) -> None:
    pool = kv_pool(impl, case.dtype)
    expect_equal(
        "size, page_size, num_layers, dtype",
        (pool.size, pool.page_size, pool.num_layers, pool.dtype),
        (SIZE, PAGE_SIZE, NUM_LAYERS, case.dtype),
    )
    expected = contents(pool)
    for i, buffer in enumerate((pool.k_buffer, pool.v_buffer)):
        form = (tuple(buffer(2).shape), buffer(2).dtype, buffer(2).device.type)
        expect_equal(
            "a buffer's form",
            form,
            ((NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM), case.dtype, check_device().type),
        )
        buffer(2)[7] = 1.5
        expected[i * NUM_LAYERS + 2][7] = 1.5
    expect_contents("written through the buffers", pool, expected)


@contract("store writes K and V of one layer to its slots, and nothing else.", POOL_TYPES)
def store_writes_its_slots(impl: Any, case: Case) -> None:
    pool, inputs = kv_pool(impl, case.dtype), Inputs(seed=1)
    k, v = (inputs.normal(3, NUM_KV_HEADS, HEAD_DIM, dtype=case.dtype) for _ in range(2))
    expected = contents(pool)
    expected[1][slots(9, 4, 19)] = k
    expected[NUM_LAYERS + 1][slots(9, 4, 19)] = v
    pool.store(1, slots(9, 4, 19), k, v)
    expect_contents("after store", pool, expected)


@contract("store casts to the pool's dtype.", POOL_TYPES)
def store_casts(impl: Any, case: Case) -> None:
    for dtype in {torch.float32, torch.bfloat16} - {case.dtype}:
        pool, inputs = kv_pool(impl, case.dtype), Inputs(seed=2)
        k, v = (inputs.normal(2, NUM_KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
        pool.store(0, slots(4, 5), k, v)
        expect_equal(f"K from {dtype}", pool.k_buffer(0)[4:6], k.to(case.dtype))
        expect_equal(f"V from {dtype}", pool.v_buffer(0)[4:6], v.to(case.dtype))


def _merged(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.cat([torch.full_like(k, torch.nan), k, v], dim=1)
    return both[:, NUM_KV_HEADS : 2 * NUM_KV_HEADS], both[:, 2 * NUM_KV_HEADS :]


@contract(
    "k and v may be views, for instance of one merged tensor.",
    table("make", ("merged", _merged), ("amid others", lambda k, v: (amid_poison(k), amid_poison(v)))),
)
def store_takes_views(impl: Any, case: Case) -> None:
    pool, inputs = kv_pool(impl), Inputs(seed=3)
    k, v = (inputs.normal(3, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
    pool.store(2, slots(6, 17, 8), *case.make(k, v))
    expect_equal("K", pool.k_buffer(2)[slots(6, 17, 8)], k)
    expect_equal("V", pool.v_buffer(2)[slots(6, 17, 8)], v)


@contract("Several tokens may be stored to the dummy page; live slots keep their values.", EXAMPLE)
def padding_goes_to_the_dummy_page(impl: Any, case: Case) -> None:
    pool, inputs = kv_pool(impl), Inputs(seed=4)
    k, v = (inputs.normal(4, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
    expected = contents(pool)
    expected[0][6], expected[NUM_LAYERS][6] = k[1], v[1]
    pool.store(0, slots(0, 6, 0, 0), k, v)
    for i in (0, NUM_LAYERS):  # a dummy slot may keep any of its tokens
        (pool.k_buffer(0) if i == 0 else pool.v_buffer(0))[0] = expected[i][0]
    expect_contents("after store", pool, expected)


class Move(Case):
    """`pairs`: (target, source)."""

    def check(self) -> None:
        targets = [target for target, _ in self.pairs]
        if len(set(targets)) < len(targets):
            raise ValueError("targets must be distinct")


@contract(
    "move copies the KV of all layers as if all sources were read before any target is written.",
    table(
        "pairs",
        ("nothing", ()),
        ("apart", ((4, 12), (5, 9))),
        ("one source twice", ((4, 12), (5, 12))),
        ("to itself", ((7, 7), (8, 9))),
        ("forward by one", ((5, 4), (6, 5), (7, 6), (8, 7))),
        ("backward by one", ((4, 5), (5, 6), (6, 7), (7, 8))),
        ("a ring", ((4, 5), (5, 6), (6, 4))),
        of=Move,
    ),
)
def move_reads_before_it_writes(impl: Any, case: Move) -> None:
    pool = kv_pool(impl)
    expected = contents(pool)
    for layer in expected:
        before = layer.clone()
        for target, source in case.pairs:
            layer[target] = before[source]
    pool.move(slots(*(target for target, _ in case.pairs)), slots(*(source for _, source in case.pairs)))
    expect_contents("after move", pool, expected)


@contract("num_bytes_per_token counts K and V of all layers.", POOL_TYPES)
def bytes_per_token(impl: Any, case: Case) -> None:
    pool = kv_pool(impl, case.dtype)
    num_bytes = sum(buffer.numel() * buffer.element_size() for buffer in contents(pool))
    expect_equal("num_bytes_per_token", pool.num_bytes_per_token, num_bytes // NUM_SLOTS)
    expect_true("it is a whole number of bytes", num_bytes % NUM_SLOTS == 0)
