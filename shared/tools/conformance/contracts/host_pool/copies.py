"""Clauses of a host pool: loaded KV has the bits of the stored KV."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config.model import LinearAttentionConfig
from diptych.shared.interfaces import HostPool, StatePool, TokenToKVPool
from diptych.shared.interfaces.host_pool import byte_rows
from diptych.shared.scheduling.host_states import StateRows
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs

NUM_LAYERS, NUM_PAGES = 3, 7


def make_kv_pool(impl: type[HostPool], dtype: torch.dtype = torch.float32, seed: int = 0) -> TokenToKVPool:
    """A KV pool of random bits, which include NaN."""
    pool_class = registry.load("memory_pool", impl.pools).TokenToKVPool
    pool: TokenToKVPool = pool_class(60, 1, NUM_LAYERS, 2, 5, dtype, check_device())
    for i, rows in enumerate(all_rows(pool)):
        rows.copy_(Inputs(seed + i).integers(256, *rows.shape).to(torch.uint8))
    return pool


def all_rows(pool: TokenToKVPool) -> list[torch.Tensor]:
    return [rows for layer_id in range(NUM_LAYERS) for rows in byte_rows(pool, layer_id)]


def bits(pool: TokenToKVPool, slots: torch.Tensor) -> list[list[list[int]]]:
    """The bits of these slots, in each buffer of each layer."""
    return [rows[slots.to(rows.device)].tolist() for rows in all_rows(pool)]


def scattered(seed: int, num: int) -> torch.Tensor:
    return Inputs(seed).permutation(60)[:num].cpu() + 1


@contract(
    "Loaded tokens have the bits of the stored ones, whatever type they are of; other slots are not touched.",
    table(
        "dtype page_len pages num_skipped",
        ("float32", torch.float32, 4, (5, 0, 6), 0),
        ("bfloat16, a part", torch.bfloat16, 4, (1, 2, 4), 3),
        ("float8", torch.float8_e4m3fn, 1, (3, 2, 1), 1),
    ),
)
def round_trip(impl: type[HostPool], case: Case) -> None:
    pool = make_kv_pool(impl, case.dtype)
    host = impl(pool, NUM_PAGES, case.page_len)
    num_tokens = len(case.pages) * case.page_len
    slots = scattered(1, 2 * num_tokens)
    source, target = slots[:num_tokens], slots[num_tokens + case.num_skipped :]
    expected = bits(pool, source[case.num_skipped :])
    others = torch.tensor(sorted(set(range(61)) - set(target.tolist())))
    untouched = bits(pool, others)
    host.store(case.pages, source)
    host.before_pass()
    host.load(case.pages, target, case.num_skipped)
    host.before_pass()
    expect_equal("bits of the loaded tokens", bits(pool, target), expected)
    expect_equal("bits of other slots", bits(pool, others), untouched)


@contract("A pass that overwrites the slots after a store does not change the page.", EXAMPLE)
def overwritten_after_store(impl: type[HostPool], case: Case) -> None:
    pool = make_kv_pool(impl)
    host = impl(pool, NUM_PAGES, 4)
    slots = scattered(2, 8)
    expected = bits(pool, slots)
    host.store([4, 2], slots)
    host.before_pass()
    for rows in all_rows(pool):
        rows.fill_(7)
    host.load([4, 2], slots)
    host.before_pass()
    expect_equal("bits after the load", bits(pool, slots), expected)


@contract("Calls take effect in their order, also without a pass between them.", EXAMPLE)
def order_of_calls(impl: type[HostPool], case: Case) -> None:
    pool = make_kv_pool(impl)
    host = impl(pool, NUM_PAGES, 4)
    first, second, third, fourth = scattered(3, 16).split(4)
    expected = bits(pool, first), bits(pool, second)
    host.store([0], first)
    host.load([0], third)
    host.store([0], second)
    host.load([0], fourth)
    host.before_pass()
    expect_equal("bits of the first page", bits(pool, third), expected[0])
    expect_equal("bits of the page that replaced it", bits(pool, fourth), expected[1])


@contract("The views of a page, copied to those of another pool, are the same page there.", EXAMPLE)
def bytes_of_a_page(impl: type[HostPool], case: Case) -> None:
    pools = make_kv_pool(impl), make_kv_pool(impl, seed=50)
    hosts = [impl(pool, NUM_PAGES, 4) for pool in pools]
    slots = scattered(4, 8)
    expected = bits(pools[0], slots)
    hosts[0].store([3, 5], slots)
    hosts[0].copies_so_far()()
    for page in (3, 5):
        for target, source in zip(hosts[1].page_views(page + 1), hosts[0].page_views(page), strict=True):
            target[:] = source
    hosts[1].load([4, 6], slots)
    hosts[1].before_pass()
    expect_equal("bits in the other pool", bits(pools[1], slots), expected)


@contract("States of linear attention are copied likewise: a row is a slot, and a state is a page.", EXAMPLE)
def states(impl: type[HostPool], case: Case) -> None:
    pool = StatePool(9, NUM_LAYERS, LinearAttentionConfig(2, 4, 3, 5, 4), torch.bfloat16, check_device())
    for i, buffer in enumerate((pool.inputs, pool.recurrent)):
        buffer.copy_(Inputs(i).normal(*buffer.shape, dtype=buffer.dtype))
    expected = [buffer.clone() for buffer in (pool.inputs, pool.recurrent)]
    for buffer in expected:
        buffer[:, [8, 3]] = buffer[:, [2, 6]]
    rows: Any = StateRows(pool)
    host = impl(rows, NUM_PAGES, 1)
    host.store([4, 1], torch.tensor([2, 6]))
    host.load([4, 1], torch.tensor([8, 3]))
    host.before_pass()
    for name, found, wanted in zip(("inputs", "states"), (pool.inputs, pool.recurrent), expected):
        expect_equal(name, found, wanted)
