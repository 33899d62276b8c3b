"""Clauses of the radix cache: a request's memory, cached while it computes and freed once."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import PrefixCache
from diptych.shared.scheduling.invariants import check_idle
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.contracts.radix_cache.match_and_insert import (
    AROUND_PAGES,
    PAGE_SIZES,
    sizes,
)
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld


@contract(
    "After prefill the tree owns the whole pages, locked; the request owns the partial page.",
    AROUND_PAGES,
)
def prefill_is_cached(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    length, whole = case.length, case.length // case.page_size * case.page_size
    req = world.admit(range(1, length + 1)) if length else None
    if req is None:
        return
    row = world.row(req)
    world.cache_unfinished(req)
    world.check()
    expect_equal("cache_protected_len", req.cache_protected_len, whole)
    expect_equal("prefix_indices, the partial page included", req.prefix_indices.tolist(), row)
    expect_equal("dtype of prefix_indices", req.prefix_indices.dtype, torch.int64)
    expect_equal("the row", world.row(req), row)
    expect_equal("what others find", world.match(range(1, 100)), row[:whole])
    expect_equal("sizes", sizes(world.cache), (0, whole))
    world.finish(req)
    expect_equal("evictable_size() at the end", world.cache.evictable_size(), whole)
    world.expect_idle()


@contract(
    "A chunk continues where the previous one ended, also within a page.",
    grid("page {page_size}, chunks of {chunk}", page_size=(1, 2, 4), chunk=(3, 4, 8)),
)
def chunk_after_chunk(impl: type[PrefixCache], case: Case) -> None:
    assert case.chunk >= 1
    world = CacheWorld(impl, case.page_size)
    req = world.admit(range(19), chunk=case.chunk)
    done = min(case.chunk, 19)
    while True:
        world.cache_unfinished(req)
        world.check()
        expect_equal("len(prefix_indices)", len(req.prefix_indices), done)
        expect_equal(
            f"cache_protected_len of {done}", req.cache_protected_len, done // case.page_size * case.page_size
        )
        if done == 19:
            break
        world.extend(req, case.chunk)
        world.check()
        done = min(done + case.chunk, 19)
    world.finish(req)
    expect_equal("tokens found", len(world.match(range(19))), 19 // case.page_size * case.page_size)
    world.expect_idle()


@contract("A row is remapped to the tree's slots before the request's duplicates are freed.", PAGE_SIZES)
def remapped_before_freed(impl: type[PrefixCache], case: Case) -> None:
    """Two requests compute the same prompt, and the second is cached later. While its row names the slots
    being freed, another request could overwrite the KV that it reads."""
    world = CacheWorld(impl, case.page_size)
    length = 3 * case.page_size + 1
    whole = length // case.page_size * case.page_size
    first, second = world.admit(range(length)), world.admit(range(length))
    own = world.row(second)
    freed: list[int] = []

    def look(slots: torch.Tensor) -> None:
        still_named = set(slots.tolist()) & set(world.row(second))
        expect_equal("slots freed that the row still names", still_named, set())
        freed.extend(slots.tolist())

    world.cache_unfinished(first)
    world.on_free = look
    world.cache_unfinished(second)
    world.on_free = None
    expect_equal("slots freed", sorted(freed), sorted(own[:whole]))
    expect_equal("the row", world.row(second), world.row(first)[:whole] + own[whole:])
    world.check()
    taken = world.prefill(range(50, 50 + 3 * case.page_size))  # takes the freed slots
    world.check()
    for req in (first, second, taken):
        world.finish(req)
    world.expect_idle()


@contract("Only duplicates are freed: neither the matched prefix nor the partial page.", PAGE_SIZES)
def duplicates_freed_alone(impl: type[PrefixCache], case: Case) -> None:
    world, p = CacheWorld(impl, case.page_size), case.page_size
    world.finish(world.prefill(range(2 * p)))
    first, second = world.admit(range(5 * p + 1)), world.admit(range(4 * p + 1))
    expect_equal("matched", (first.cache_protected_len, second.cache_protected_len), (2 * p, 2 * p))
    world.cache_unfinished(first)
    world.cache_unfinished(second)
    world.check()
    expect_equal("the shared part of the rows", world.row(second)[: 4 * p], world.row(first)[: 4 * p])
    expect_equal("cache_protected_len", second.cache_protected_len, (4 * p + 1) // p * p)
    world.finish(second)
    world.check()
    world.finish(first)
    world.expect_idle()


@contract("A request whose prompt is completely cached still computes its last token.", AROUND_PAGES)
def full_hit(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    if case.length == 0:
        return
    world.finish(world.prefill(range(case.length)))
    again = world.admit(range(case.length))
    num_cached = (case.length - 1) // case.page_size * case.page_size
    expect_equal("tokens found", case.length - again.extend_input_len, num_cached)
    world.cache_unfinished(again)
    world.check()
    world.finish(again)
    world.expect_idle()


@contract(
    "A finished request caches the whole pages of its committed tokens; the last token has no KV.",
    grid("page {page_size}, {num_steps} steps", page_size=(1, 2, 4), num_steps=(0, 1, 4, 7)),
)
def finish_caches_committed(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    req = world.prefill(range(6))
    req.output_ids.append(100)
    for step in range(case.num_steps):
        world.decode(req, 101 + step)
        world.check()
    tokens, row = req.all_ids, world.row(req)
    whole = (len(tokens) - 1) // case.page_size * case.page_size
    world.finish(req)
    expect_equal("found afterwards", world.match([*tokens, 0]), row[:whole])
    expect_equal("evictable_size()", world.cache.evictable_size(), whole)
    world.expect_idle()


@contract("Of two requests with the same output, the second one's pages are freed.", PAGE_SIZES)
def finish_of_a_duplicate(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    reqs = [world.prefill(range(5)), world.prefill(range(5))]
    for step in range(6):
        for req in reqs:
            world.decode(req, 100 + step)
        world.check()
    row = world.row(reqs[0])
    world.finish(reqs[0])
    world.check()
    tokens = reqs[1].all_ids
    world.finish(reqs[1])
    whole = (len(tokens) - 1) // case.page_size * case.page_size
    expect_equal("found afterwards", world.match(tokens[:-1]), row[:whole])
    world.expect_idle()


@contract("Without insert, all slots of the request are freed, and the tree stays as it is.", PAGE_SIZES)
def finish_without_insert(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    req = world.prefill(range(9))
    for step in range(5):
        world.decode(req, 100 + step)
    whole = 9 // case.page_size * case.page_size
    world.finish(req, is_insert=False)
    expect_equal("evictable_size()", world.cache.evictable_size(), whole)
    expect_equal("tokens found", len(world.match(range(9))), whole)
    world.expect_idle()


@contract("A retracted request owns no memory, and later matches its prompt and outputs again.", PAGE_SIZES)
def retracted_and_readmitted(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size)
    req = world.prefill(range(8))
    for step in range(3):
        world.decode(req, 100 + step)
    world.finish(req, is_insert=False)
    for name in ("kv_allocated_len", "kv_committed_len", "cache_protected_len"):
        expect_equal(f"{name} of a finished request", getattr(req, name), 0)
    expect_equal("prefix_indices of a finished request", req.prefix_indices.tolist(), [])
    expect_equal("the node it locks", req.last_node, None)
    check_idle(world.allocator, world.req_to_token_pool, world.cache)
    req.reset_for_retraction()
    world.readmit(req)
    expect_equal("cache_protected_len", req.cache_protected_len, 8 // case.page_size * case.page_size)
    world.cache_unfinished(req)
    world.check()
    expect_equal("kv_committed_len", req.kv_committed_len, 8 + 4)
    world.finish(req)
    world.expect_idle()


BOTH_ENDS = table("is_insert", ("insert", True), ("no insert", False))


@contract("A request that ends between two chunks frees all its memory.", BOTH_ENDS)
def ends_between_chunks(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, 4)
    req = world.admit(range(30), chunk=8)
    world.cache_unfinished(req)
    world.extend(req, 8)  # computed, not yet cached
    world.finish(req, case.is_insert)
    expect_equal("evictable_size()", world.cache.evictable_size(), 16 if case.is_insert else 8)
    world.expect_idle()


@contract("The prefix of a live request is never evicted.", EXAMPLE)
def live_prefix_survives(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, 2)
    req = world.prefill(range(8))
    world.finish(world.prefill(range(100, 110)))
    expect_equal("evict(1000)", world.cache.evict(1000), 10)
    world.check()
    expect_equal("found", world.match(range(8)), world.row(req))


@contract("Requests of different extra_key share nothing.", EXAMPLE)
def requests_in_namespaces(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, 2)
    reqs = [world.prefill(range(8), extra_key=extra_key) for extra_key in (None, "a", "b")]
    world.check()
    expect_equal("slots in use", len({slot for req in reqs for slot in world.row(req)}), 24)
    expect_equal("tokens found in a", len(world.match(range(8), "a")), 8)
    expect_equal("found in another", world.match(range(8), "c"), [])
    for req in reqs:
        world.finish(req)
    world.expect_idle()


@contract("Cached tokens have the priority of their request.", BOTH_ENDS)
def priority_of_a_request(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, 1, eviction_policy="priority")
    world.finish(world.prefill([1, 2, 3], priority=5), case.is_insert)
    world.finish(world.prefill([4, 5, 6], priority=1))
    world.match([4, 5, 6])
    world.cache.evict(1)
    expect_equal("the important one's tokens", len(world.match([1, 2, 3])), 3)
    expect_equal("the other one's", world.match([4, 5, 6]), [])


@contract(
    "A bigram cache stores one token less: draft KV of the last token depends on the next token.", PAGE_SIZES
)
def bigram_requests(impl: type[PrefixCache], case: Case) -> None:
    world = CacheWorld(impl, case.page_size, is_bigram=True)
    req = world.prefill(range(9))
    whole = 8 // case.page_size * case.page_size
    expect_equal("cache_protected_len", req.cache_protected_len, whole)
    expect_equal("len(prefix_indices)", len(req.prefix_indices), 9)
    world.check()
    row = world.row(req)
    expect_equal("found", world.match([*range(9), 77]), row[:whole])
    parting = 3 // case.page_size * case.page_size
    expect_equal("found of a key that parts", world.match([0, 1, 2, 3, 77]), row[:parting])
    world.decode(req, 100)
    world.check()
    world.finish(req)
    expect_true("whole pages are cached", world.cache.evictable_size() >= whole)
    world.expect_idle()
