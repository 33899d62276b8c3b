"""Clauses of the scheduling policy: many passes, while requests and prefixes change."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import PrefixCache, RadixKey, SchedulePolicy
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.short_repr import short_repr
from diptych.shared.tools.conformance.contracts.schedule_policy.order import req, rids
from diptych.shared.tools.conformance.oracles.flag_space import POLICIES
from diptych.shared.types import Req

PREFIX_LENS = (0, 3, 8, 12, 40)


class Policy(Case):
    """The configuration of a policy. `by_priority`: with priority scheduling. `tree`: the panel of the radix
    cache; one supports watching, one does not. `is_bigram`: the tree holds pairs of tokens, for a draft
    model."""

    by_priority = False
    page_size = 1
    tree = "reference"
    is_bigram = False

    def config(self) -> EngineConfig:
        return EngineConfig(
            schedule_policy=self.policy,
            enable_priority_scheduling=self.by_priority,
            page_size=self.page_size,
            in_batch_prefix_check_threshold=10,
            in_batch_prefix_deprioritize_threshold=8,
        )

    def make_tree(self) -> PrefixCache:
        """A tree whose eviction order does not depend on matches, because a policy may match or not."""
        implementation = registry.load("radix_cache", self.tree)
        tree: PrefixCache = implementation(self.page_size, eviction_policy="fifo", is_bigram=self.is_bigram)
        return tree


PLAIN = tuple(
    Policy(policy + ", by priority" * by_priority, policy=policy, by_priority=by_priority)
    for policy in POLICIES
    for by_priority in (False, True)
    if policy not in ("lpm", "dfs-weight") and (not by_priority or policy in ("fcfs", "lof"))
)
CACHE_AWARE = tuple(
    Policy(
        f"{policy}, page {page_size}, {tree} tree{' of pairs' * is_bigram}",
        policy=policy,
        page_size=page_size,
        tree=tree,
        is_bigram=is_bigram,
    )
    for policy in ("lpm", "dfs-weight")
    for page_size, is_bigram in ((1, False), (4, False), (4, True))
    for tree in ("reference", "optimized")
)
EVERY_POLICY = PLAIN + CACHE_AWARE


@contract(
    "An order stays a permutation of the requests that waited at the call, while the queue changes.",
    EVERY_POLICY,
)
def walked_while_the_queue_changes(impl: type[SchedulePolicy], case: Policy) -> None:
    policy, queue = impl(case.config(), case.make_tree()), WaitingQueue()
    waiting = [random_req(random.Random(i), i) for i in range(12)]
    for one in waiting:
        queue.append(one)
    given = []
    for one in policy.order(queue, []).order:
        given.append(one.rid)
        queue.remove(one)
        queue.append(random_req(random.Random(len(given)), 100 + len(given)))
    expect_equal("who was given", sorted(given, key=int), [one.rid for one in waiting])
    expect_equal(
        "who is given next time",
        sorted(rids(policy.order(queue, [])), key=int),
        [str(100 + i) for i in range(1, 13)],
    )


Kind = Literal["join", "leave", "come back", "cache", "match", "lock", "evict", "flush", "pass"]


@dataclass(frozen=True, repr=False)
class Event:
    """One event. `which`: the index among waiting requests, requests that have left, or all prompts. "lock":
    lock a prompt's match, or release a lock. "pass": order the queue, and admit `num_admitted` requests."""

    kind: Kind
    which: int = 0
    num_admitted: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.which < 0 or self.num_admitted < 0:
            raise ValueError(f"no event: {self}")


def random_passes(policy: Policy, seed: int, num_events: int = 120, num_waiting: int = 0) -> Case:
    """Random passes once `num_waiting` requests have joined."""
    rng = random.Random(seed)
    kinds = rng.choices(
        get_args(Kind),
        [16, 2, 2, 8, 4, 2, 6, 1, 8],
        k=num_events,
    )
    kinds = ["join"] * num_waiting + kinds
    events = tuple(Event(kind, rng.randrange(1000), rng.randrange(4)) for kind in kinds)
    name = f"{policy.name}, events {seed}" + f", {num_waiting} waiting" * (num_waiting > 0)
    return Case(name, policy=policy, events=events)


def random_req(rng: random.Random, number: int) -> Req:
    """A random request. Prompts share prefixes of several lengths; ties are frequent in all sort keys."""
    family = rng.randrange(4)
    shared_len = rng.choice(PREFIX_LENS)
    tokens = [family + 1] * shared_len + [rng.randint(5, 6) for _ in range(rng.randint(1, 20))]
    return req(
        str(number),
        tokens,
        rng.choice([4, 8, 16]),
        extra_key=rng.choice([None, None, "a"]),
        priority=rng.randrange(3),
        queue_start_time=float(rng.randrange(3)),
        routing_key=rng.choice([None, "x", "y", "z"]),
    )


@dataclass
class Run:
    """A policy with its own tree and queue. `as_list`: it gets the queue as a list in each pass."""

    impl: Any
    case: Case
    as_list: bool = False
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    gone: list[Req] = field(default_factory=list)
    locked: list[Any] = field(default_factory=list)
    num_made: int = 0
    trace: list[Any] = field(default_factory=list)

    def play(self) -> list[Any]:
        self.tree = self.case.policy.make_tree()
        self.policy = self.impl(self.case.policy.config(), self.tree)
        for event in self.case.events:
            getattr(self, "_" + event.kind.replace(" ", "_"))(event)
        return self.trace

    def _join(self, event: Event) -> None:
        self.queue.append(random_req(random.Random(event.which), self.num_made))
        self.num_made += 1

    def _leave(self, event: Event) -> None:
        if self.queue:
            self.gone.append(self.queue[event.which % len(self.queue)])
            self.queue.remove(self.gone[-1])

    def _come_back(self, event: Event) -> None:
        """Queue a request again, as after a retraction: with more tokens."""
        if self.gone:
            back = self.gone.pop(event.which % len(self.gone))
            back.output_ids.append(5)
            back.queue_start_time = float(event.which % 3)
            self.queue.append(back)

    def _key(self, event: Event) -> RadixKey:
        made = random_req(random.Random(event.which), 0)
        return RadixKey(made.all_ids, made.extra_key, self.case.policy.is_bigram)

    def _cache(self, event: Event) -> None:
        key = self._key(event)
        self.tree.insert(key, torch.arange(len(key)))

    def _match(self, event: Event) -> None:
        self.tree.match_prefix(self._key(event))

    def _lock(self, event: Event) -> None:
        if self.locked and event.which % 2:
            self.tree.dec_lock_ref(self.locked.pop())
        else:
            self.locked.append(self.tree.match_prefix(self._key(event)).last_node)
            self.tree.inc_lock_ref(self.locked[-1])

    def _evict(self, event: Event) -> None:
        self.tree.evict(event.which % 30)

    def _flush(self, event: Event) -> None:
        self.tree.reset()
        self.locked.clear()

    def _pass(self, event: Event) -> None:
        queue = list(self.queue) if self.as_list else self.queue
        result = self.policy.order(queue, self.gone)
        order = list(result.order)
        self.trace.append(([one.rid for one in order], sorted(result.deprioritized)))
        for one in order[: event.num_admitted]:
            self.queue.remove(one)
            self.gone.append(one)


PASSES = tuple(random_passes(policy, seed) for policy in EVERY_POLICY for seed in range(4))
LONG_QUEUES = tuple(
    random_passes(policy, 0, 60, num_waiting=120) for policy in CACHE_AWARE if policy.policy == "lpm"
)


@contract("A WaitingQueue that changes between passes is ordered like a list of the same requests.", PASSES)
def a_followed_queue(impl: type[SchedulePolicy], case: Case) -> None:
    followed, listed = Run(impl, case).play(), Run(impl, case, as_list=True).play()
    expect_equal("orders", followed, listed)


@agreement("In each pass, order and deprioritized requests are those of the reference.", PASSES + LONG_QUEUES)
def the_same_passes(impl: type[SchedulePolicy], case: Case, reference: type[SchedulePolicy]) -> None:
    ours, theirs = Run(impl, case).play(), Run(reference, case).play()
    expect_true("as many passes", len(ours) == len(theirs))
    for i, (mine, its) in enumerate(zip(ours, theirs)):
        expect_equal(f"pass {i}", mine, its)
