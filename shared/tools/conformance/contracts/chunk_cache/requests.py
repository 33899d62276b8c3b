"""Clauses of the chunk cache: it finds nothing, and keeps the chunks of a prompt together."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import PrefixCache, RadixKey
from diptych.shared.tools.conformance.clauses.case import Case, grid, page_sizes
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld

PAGE_SIZES = page_sizes(1, 2, 4)


@contract("Nothing is found, stored or evicted; disable is True.", PAGE_SIZES)
def finds_nothing(impl: type[PrefixCache], case: Case) -> None:
    cache = impl(case.page_size)
    expect_equal("disable, page_size", (cache.disable, cache.page_size), (True, case.page_size))
    key = RadixKey(list(range(4 * case.page_size)))
    result = cache.insert(key, torch.arange(len(key)))
    expect_equal("prefix_len", result.prefix_len, 0)
    match = cache.match_prefix(key)
    expect_equal("match", match.device_indices, torch.empty(0, dtype=torch.int64))
    cache.inc_lock_ref(match.last_node)
    expect_equal("sizes", (cache.evictable_size(), cache.protected_size()), (0, 0))
    cache.dec_lock_ref(match.last_node)
    expect_equal("the root's number", cache.node_id(match.last_node), 0)
    expect_equal("evict(100)", cache.evict(100), 0)
    cache.discard(key, 0)
    expect_equal("nodes", list(cache.nodes()), [])
    cache.reset()


@contract(
    "A chunk continues where the previous one ended: prefix_indices holds all computed slots.",
    grid("page {page_size}, chunks of {chunk}", page_size=(1, 2, 4), chunk=(3, 4, 8)),
)
def chunks_stay_together(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    req = world.admit(range(11), chunk=case.chunk)
    while True:
        world.cache_unfinished(req)
        world.check()
        expect_equal("prefix_indices", req.prefix_indices.tolist(), world.row(req))
        expect_equal("dtype of prefix_indices", req.prefix_indices.dtype, torch.int64)
        expect_equal("cache_protected_len", req.cache_protected_len, 0)
        if len(req.prefix_indices) == 11:
            break
        world.extend(req, case.chunk)
    world.decode(req, 100)
    world.check()
    world.finish(req)
    world.expect_idle()


@contract("Two requests with the same prompt share no slots.", PAGE_SIZES)
def requests_share_nothing(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    first, second = world.prefill(range(11)), world.prefill(range(11))
    expect_equal("shared slots", set(world.row(first)) & set(world.row(second)), set())
    world.check()
    world.retract(first)
    expect_true("a retracted request comes back", world.readmit(first))
    expect_equal("tokens it computes", first.extend_input_len, 11)
    world.check()
    for req in (first, second):
        world.finish(req)
    expect_equal("free slots", world.allocator.available_size(), world.allocator.size)
    world.expect_idle()
