"""Clauses of all prefix caches: requests are admitted, computed, retracted and ended with scarce memory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, get_args

from diptych.shared.interfaces import PrefixCache
from diptych.shared.tools.conformance.clauses.case import Case, grid
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.short_repr import short_repr
from diptych.shared.tools.conformance.oracles.cache_world import NUM_ROWS, CacheWorld
from diptych.shared.types import Req

Kind = Literal["admit", "readmit", "chunk", "decode", "over-allocate", "retract", "finish", "drop"]
POLICIES = ("lru", "lfu", "fifo", "priority")


@dataclass(frozen=True, repr=False)
class Event:
    """One event. `which` counts the live (for readmit: the retracted) requests, modulo their number. `chunk`
    0: the whole prompt. `is_cached_at_once` False: several requests may compute before the first of them is
    cached."""

    kind: Kind
    which: int = 0
    prompt: tuple[int, ...] = ()
    chunk: int = 0
    extra_key: str | None = None
    priority: int = 0
    is_cached_at_once: bool = True
    token: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or (self.kind == "admit" and not self.prompt):
            raise ValueError(f"no event: {self}")


def random_lives(seed: int, num_events: int = 40) -> Case:
    """Random events. Prompts consist of two different tokens, so that prefixes are often shared."""
    rng = random.Random(seed)
    policy, page_size = POLICIES[seed % len(POLICIES)], (1, 2, 4)[seed // len(POLICIES) % 3]
    name = f"random lives {seed}, {policy}, page {page_size}"
    events = tuple(_random_event(rng, page_size) for _ in range(num_events))
    num_pages = rng.choice([8, 14, 30])
    return Case(name, page_size=page_size, policy=policy, events=events, num_pages=num_pages)


def _random_event(rng: random.Random, page_size: int) -> Event:
    kind = rng.choices(get_args(Kind), weights=[8, 2, 5, 8, 1, 2, 3, 1])[0]
    which = rng.randrange(20)
    if kind != "admit":
        return Event(kind, which, token=rng.randint(0, 1))
    return Event(
        "admit",
        prompt=tuple(rng.choices([0, 1], k=rng.randint(1, 5 * page_size + 2))),
        chunk=rng.choice([0, page_size, 2 * page_size, 3]),
        extra_key=rng.choice([None, None, "a"]),
        priority=rng.choice([0, 0, 3]),
        is_cached_at_once=rng.random() < 0.5,
    )


class Run:
    def __init__(self, impl: type[PrefixCache], case: Case) -> None:
        self.case = case
        self.world = CacheWorld(impl, case.page_size, case.num_pages, eviction_policy=case.policy)
        self.retracted: list[Req] = []
        self.trace: list[Any] = []

    def play(self) -> list[Any]:
        for event in self.case.events:
            self._happen(event)
            self._check()
        while self.world.live:
            self.world.finish(self.world.live[0])
            self._check()
        self.world.expect_idle()
        return self.trace

    def _happen(self, event: Event) -> None:
        world = self.world
        if event.kind == "admit":
            if len(world.live) < NUM_ROWS:
                chunk = event.chunk or None
                req = world.admit(event.prompt, chunk, event.extra_key, event.priority)
                if req is not None and event.is_cached_at_once:
                    world.cache_unfinished(req)
            return
        if event.kind == "readmit":
            if self.retracted and len(world.live) < NUM_ROWS:
                req = self.retracted.pop(event.which % len(self.retracted))
                if world.readmit(req):
                    world.cache_unfinished(req)
            return
        if not world.live:
            return
        req = world.live[event.which % len(world.live)]
        is_decoding = req.kv_committed_len >= len(req.origin_input_ids)
        is_over_allocated = req.kv_allocated_len > req.kv_committed_len
        if event.kind == "chunk" and len(req.fill_ids) == req.kv_committed_len and not is_over_allocated:
            world.cache_unfinished(req)
            if not is_decoding:
                world.extend(req, self.case.page_size)
        elif event.kind == "decode" and is_decoding and not is_over_allocated:
            world.decode(req, event.token)
        elif event.kind == "over-allocate" and is_decoding and not is_over_allocated:
            world.over_allocate(req, 1 + event.which % 5)
        elif event.kind == "retract":
            world.retract(req)
            self.retracted.append(req)
        elif event.kind in ("finish", "drop"):
            world.finish(req, is_insert=event.kind == "finish")

    def _check(self) -> None:
        self.world.check()
        cache, allocator = self.world.cache, self.world.allocator
        lens = [(req.cache_protected_len, len(req.prefix_indices)) for req in self.world.live]
        sizes = allocator.available_size(), cache.evictable_size(), cache.protected_size()
        self.trace.append((lens, sizes))


OVER_ALLOCATIONS = grid(
    lambda page_size, num_extra, is_insert: (
        f"page {page_size}, {num_extra} more{', no insert' * (not is_insert)}"
    ),
    page_size=(1, 2, 4),
    num_extra=(1, 2, 5),
    is_insert=(True, False),
)


@contract(
    "Slots that were allocated and never committed are freed when the request ends, once.", OVER_ALLOCATIONS
)
def over_allocated_slots(impl: type[PrefixCache], case: Case) -> None:
    """A step in flight or rejected drafts leave over-allocated slots."""
    world = CacheWorld(impl, case.page_size)
    req = world.prefill(range(7))
    world.over_allocate(req, case.num_extra)
    world.check()
    world.finish(req, case.is_insert)
    world.expect_idle()


LIVES = tuple(random_lives(seed) for seed in range(60))


@contract(
    "After each event, slots and locks have one owner each, and requests read the KV of their own tokens.",
    LIVES,
)
def any_lives(impl: type[PrefixCache], case: Case) -> None:
    Run(impl, case).play()


@agreement("The same requests share, lock and free the same amounts as with the reference.", LIVES[:24])
def same_lives(impl: type[PrefixCache], case: Case, reference: type[PrefixCache]) -> None:
    for i, (actual, expected) in enumerate(zip(Run(impl, case).play(), Run(reference, case).play())):
        expect_equal(f"(protected, prefix) of requests; sizes, after event {i}", actual, expected)
