"""Simulates the router: hit rate and balance of its policies on conversations, without a model.

Each replica has a prefix cache of limited size and computes the rest of a prompt. Time is simulated: a
request takes PREFILL_SECONDS for each character that is computed and DECODE_SECONDS for its answer.
"""

from __future__ import annotations

import heapq
import itertools
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from diptych.shared.server.router.policy import CacheAwarePolicy, PrefixTree, Replica, RouterSettings
from diptych.shared.tools.bench.workloads import check_least

PREFILL_SECONDS = 1e-5
DECODE_SECONDS = 1.0


class Policy(Protocol):
    def choose(self, prompt: str, replicas: list[Replica]) -> Replica: ...


class RoundRobinPolicy:
    """Sends requests to the replicas in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, prompt: str, replicas: list[Replica]) -> Replica:
        return replicas[next(self._turns) % len(replicas)]


@dataclass(frozen=True)
class RoutingCase:
    """Conversations of several turns; those of a group share a system prompt."""

    num_replicas: int = 4
    num_conversations: int = 400
    num_turns: int = 4
    num_groups: int = 32
    system_chars: int = 4000
    turn_chars: int = 400
    cache_chars: int = 100_000  # of one replica's prefix cache
    rate: float = 20.0  # conversations that start per second
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, num_replicas=1, num_conversations=1, num_turns=1, num_groups=1, cache_chars=1)
        if not self.rate > 0:
            raise ValueError(f"rate must be more than 0, got {self.rate}")


@dataclass(frozen=True)
class RoutingResult:
    """hit_rate: characters found in a cache, of all prompt characters. max_load: the most requests in flight
    on one replica; mean_load: the mean over replicas and arrivals."""

    policy: str
    hit_rate: float
    max_load: int
    mean_load: float
    num_sent: tuple[int, ...]
    final_loads: tuple[int, ...]


def policies() -> dict[str, Policy]:
    """The policies to compare, by name."""
    settings = RouterSettings()
    return {
        "round robin": RoundRobinPolicy(),
        "least load": CacheAwarePolicy(RouterSettings(cache_threshold=1.0)),
        "cache-aware": CacheAwarePolicy(settings),
    }


def prompts(case: RoutingCase) -> Iterator[tuple[float, str]]:
    """(time, prompt) of all turns, in the order of time."""
    rng = random.Random(case.seed)
    systems = [_text(rng, case.system_chars) for _ in range(case.num_groups)]
    turns: list[tuple[float, int, str]] = []
    start = 0.0
    for number in range(case.num_conversations):
        start += rng.expovariate(case.rate)
        prompt, time = rng.choice(systems), start
        for _ in range(case.num_turns):
            prompt += _text(rng, case.turn_chars)
            turns.append((time, number, prompt))
            time += DECODE_SECONDS + rng.expovariate(0.5)
    for time, _, prompt in sorted(turns):
        yield time, prompt


def simulate(case: RoutingCase, name: str, policy: Policy) -> RoutingResult:
    """Route all turns and return hit rate and balance."""
    replicas = [Replica(f"http://replica-{i}") for i in range(case.num_replicas)]
    caches = {replica: PrefixTree() for replica in replicas}
    ends: list[tuple[float, int, Replica]] = []
    num_found = num_chars = max_load = sum_load = 0
    for number, (time, prompt) in enumerate(prompts(case)):
        while ends and ends[0][0] <= time:
            heapq.heappop(ends)[2].load -= 1
        replica = policy.choose(prompt, replicas)
        replica.load += 1
        replica.num_sent += 1
        cache = caches[replica]
        num_matched, _ = cache.match(prompt, [replica])
        cache.insert(prompt, replica)
        cache.evict(case.cache_chars)
        num_found, num_chars = num_found + num_matched, num_chars + len(prompt)
        duration = PREFILL_SECONDS * (len(prompt) - num_matched) + DECODE_SECONDS
        heapq.heappush(ends, (time + duration, number, replica))
        max_load = max(max_load, replica.load)
        sum_load += sum(each.load for each in replicas)
    for _, _, replica in ends:
        replica.load -= 1
    num_prompts = case.num_conversations * case.num_turns
    return RoutingResult(
        policy=name,
        hit_rate=num_found / num_chars,
        max_load=max_load,
        mean_load=sum_load / num_prompts / case.num_replicas,
        num_sent=tuple(replica.num_sent for replica in replicas),
        final_loads=tuple(replica.load for replica in replicas),
    )


def _text(rng: random.Random, num_chars: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase + " ", k=num_chars))
