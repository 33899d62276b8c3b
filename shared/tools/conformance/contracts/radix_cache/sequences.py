"""Clauses of the radix cache: random sequences of calls, compared with a model without a tree."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from diptych.shared.interfaces import PrefixCache, RadixKey
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.short_repr import short_repr
from diptych.shared.tools.conformance.contracts.radix_cache.eviction import POLICIES
from diptych.shared.tools.conformance.oracles.cache_world import CacheWorld
from diptych.shared.tools.conformance.oracles.radix_model import FlatCache, Prefix

Kind = Literal["insert", "match", "lock", "unlock", "evict", "discard"]


@dataclass(frozen=True, repr=False)
class Call:
    """One call. `number`: the priority of an insert, the number of tokens to evict, the position to discard
    from, or the lock to release (modulo their number)."""

    kind: Kind
    tokens: tuple[int, ...] = ()
    extra_key: str | None = None
    number: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"no call: {self}")


def random_calls(seed: int, num_calls: int = 80, is_long: bool = False) -> Case:
    """Random calls over few different tokens, so that keys share prefixes and diverge everywhere. Long keys
    have some hundred tokens, and differ in one."""
    rng = random.Random(seed)
    policy, page_size = POLICIES[seed % len(POLICIES)], (1, 2, 4)[seed // len(POLICIES) % 3]
    name = f"random calls {seed}{', long keys' * is_long}, {policy}, page {page_size}"
    calls = tuple(_random_call(rng, page_size, is_long) for _ in range(num_calls))
    return Case(
        name,
        page_size=page_size,
        policy=policy,
        is_bigram=rng.random() < 0.3,
        calls=calls,
        num_pages=2000 // page_size if is_long else rng.choice([8, 48]),
    )


def _random_call(rng: random.Random, page_size: int, is_long: bool) -> Call:
    kind = rng.choices(get_args(Kind), weights=[6, 4, 2, 2, 2, 1])[0]
    number = {"insert": rng.randint(-1, 2), "evict": rng.randint(0, 12)}.get(kind, rng.randrange(20))
    if kind in ("unlock", "evict"):
        return Call(kind, number=number)
    tokens = tuple(rng.choices([0, 1], k=rng.randint(0, 4 * page_size + 3)))
    if is_long:
        whole = [token % 11 for token in range(rng.randint(1, 400))]
        whole[rng.randrange(len(whole))] = rng.randint(9, 13)
        tokens = tuple(whole)
    if kind == "discard":
        number = rng.choice([0, rng.randint(0, len(tokens))])
    elif kind != "insert":
        number = 0
    return Call(kind, tokens, rng.choice([None, None, "a", "b"]), number)


class Run:
    """Makes the same calls on a cache and its model."""

    def __init__(self, impl: type[PrefixCache], case: Case) -> None:
        self.case = case
        world = CacheWorld(
            impl, case.page_size, case.num_pages, eviction_policy=case.policy, is_bigram=case.is_bigram
        )
        self.cache, self.allocator = world.cache, world.allocator
        self.model = FlatCache(case.page_size, case.policy)
        self.locked: list[Any] = []
        self.trace: list[Any] = []  # results that are the same in every correct implementation

    def play(self) -> list[Any]:
        for i, call in enumerate(self.case.calls):
            self.what = f"call {i} ({call.kind})"
            getattr(self, f"_{call.kind}")(call)
            self._check()
        self.what = "at the end"
        while self.locked:
            self._unlock(Call("unlock"))
        while self.cache.evictable_size():
            num_nodes = len(self.model.ends)
            self._evict(Call("evict", number=1))
            self._check()
            expect_true("evict(1) removes a node", len(self.model.ends) < num_nodes)
        expect_equal("free slots at the end", self.allocator.available_size(), self.allocator.size)
        return self.trace

    def _keys(self, call: Call) -> tuple[RadixKey, Prefix]:
        entries = pairwise(call.tokens) if self.case.is_bigram else call.tokens
        key = RadixKey(list(call.tokens), call.extra_key, self.case.is_bigram)
        return key, (call.extra_key, tuple(entries))

    def _match(self, call: Call) -> Any:
        key, prefix = self._keys(call)
        result = self.cache.match_prefix(key)
        matched = self.model.match(prefix)
        found = result.device_indices.tolist()
        expect_equal(f"{self.what}: the slots", found, self.model.slots(matched))
        self.trace.append(len(found))
        return result.last_node, matched

    def _lock(self, call: Call) -> None:
        node, matched = self._match(call)
        self.cache.inc_lock_ref(node)
        self.locked.append(node)
        self.model.locks.append(matched)

    def _unlock(self, call: Call) -> None:
        if self.locked:
            self.cache.dec_lock_ref(self.locked.pop(call.number % len(self.locked)))
            self.model.locks.pop(call.number % len(self.model.locks))

    def _insert(self, call: Call) -> None:
        key, prefix = self._keys(call)
        num_tokens = len(self.model.pages(prefix)) * self.case.page_size
        if num_tokens > self.allocator.available_size():
            self._evict(Call("evict", number=num_tokens))
        value = self.allocator.alloc(num_tokens)
        if value is None:
            return
        result = self.cache.insert(key, value, call.number)
        expected = self.model.insert(prefix, value.tolist(), call.number)
        expect_equal(f"{self.what}: prefix_len", result.prefix_len, expected)
        self.allocator.free(value[: result.prefix_len])
        self.trace.append(result.prefix_len)

    def _evict(self, call: Call) -> None:
        free = set(self.allocator.free_slots().tolist())
        num_evicted = self.cache.evict(call.number)
        freed = set(self.allocator.free_slots().tolist()) - free
        expected = self.model.evict(call.number)
        expect_equal(f"{self.what}: evict({call.number})", num_evicted, len(expected))
        expect_equal(f"{self.what}: slots freed", sorted(freed), sorted(expected))
        self.trace.append(num_evicted)

    def _discard(self, call: Call) -> None:
        key, prefix = self._keys(call)
        free = set(self.allocator.free_slots().tolist())
        self.cache.discard(key, call.number)
        freed = set(self.allocator.free_slots().tolist()) - free
        expected = self.model.discard(prefix, call.number)
        expect_equal(f"{self.what}: slots freed from {call.number} on", sorted(freed), sorted(expected))

    def _check(self) -> None:
        """Compare edges, slots and locks of all nodes, and the totals."""
        prefixes: dict[int, tuple[Any, ...]] = {0: ()}
        ends = {}
        for node in self.cache.nodes():
            prefixes[node.node_id] = (*prefixes[node.parent_id], *node.key)
            end: Any = (node.extra_key, prefixes[node.node_id])
            ends[end] = node.lock_ref
            expect_equal(f"{self.what}: lock_ref at {end}", node.lock_ref, self.model.lock_ref(end))
            if end in self.model.ends:
                expected = self.model.slots(end)[-len(node.key) :]
                expect_equal(f"{self.what}: slots of the edge to {end}", node.slots, expected)
        expect_equal(f"{self.what}: where nodes end", set(ends), set(self.model.ends))
        sizes = self.cache.evictable_size(), self.cache.protected_size()
        expect_equal(f"{self.what}: sizes", sizes, self.model.sizes())
        num_free = self.allocator.available_size()
        num_cached = len(self.model.page_slots) * self.case.page_size
        expect_equal(f"{self.what}: free + cached", num_free + num_cached, self.allocator.size)
        self.trace.append((sizes, num_free, ends))


SEQUENCES = tuple(random_calls(seed) for seed in range(96))


@contract(
    "After any sequence of calls the tree holds the same as a flat dictionary of prefixes.",
    SEQUENCES,
)
def any_calls(impl: type[PrefixCache], case: Case) -> None:
    Run(impl, case).play()


@agreement(
    "The same calls match, evict, lock and leave the same amounts as with the reference.",
    SEQUENCES[:24] + tuple(random_calls(seed, 30, is_long=True) for seed in range(8)),
)
def same_calls(impl: type[PrefixCache], case: Case, reference: type[PrefixCache]) -> None:
    for i, (actual, expected) in enumerate(zip(Run(impl, case).play(), Run(reference, case).play())):
        expect_equal(f"answer {i}", actual, expected)
