"""Times calls of the prefix cache, by cached tokens, depth and page size of the tree."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.interfaces import PrefixCache, RadixKey
from diptych.shared.tools.bench.workloads import check_least

CLOCK = time.thread_time
"""CPU time of this thread: other work on the machine counts only through cache misses."""

OPERATIONS = ("match", "insert", "evict")

TOKENS = range(1000, 2000)


@dataclass(frozen=True)
class CacheCase:
    """A tree of at least `num_tokens` tokens: whole sequences of `sequence_len` tokens and `depth` nodes
    without a common prefix."""

    panel: str
    num_tokens: int
    sequence_len: int = 1024
    depth: int = 1
    page_size: int = 1

    def __post_init__(self) -> None:
        check_least(self, num_tokens=1, sequence_len=1, depth=1, page_size=1)
        if self.sequence_len % (self.depth * self.page_size) != 0:
            raise ValueError(
                f"a sequence of {self.sequence_len} tokens has no {self.depth} nodes of whole pages of "
                f"{self.page_size}"
            )

    def __str__(self) -> str:
        sizes = f"{self.num_cached_tokens} tokens, {self.sequence_len} a sequence, {self.depth} deep"
        return f"{self.panel}: {sizes}, page {self.page_size}"

    @property
    def num_sequences(self) -> int:
        return -(-self.num_tokens // self.sequence_len)

    @property
    def num_cached_tokens(self) -> int:
        """The number of tokens in the tree, a multiple of sequence_len."""
        return self.num_sequences * self.sequence_len


@dataclass(frozen=True)
class CacheResult:
    """Seconds of each call. match: a whole sequence and one more token. insert: a sequence whose last node is
    new. evict: the least recently used node."""

    case: CacheCase
    times: dict[str, tuple[float, ...]]

    def least(self, operation: str) -> float:
        """Cost of a call on an idle processor."""
        return min(self.times[operation])

    def median(self, operation: str) -> float:
        return statistics.median(self.times[operation])


class FullCache:
    """A tree of the case's size, which the calls keep constant."""

    def __init__(self, case: CacheCase, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.node_len = case.sequence_len // case.depth
        self.tree: PrefixCache = registry.load("radix_cache", case.panel)(case.page_size)
        self.slots = torch.arange(case.sequence_len)
        self.num_made = 0
        self.case = case
        self.by_last_use: deque[list[int]] = deque()  # the sequences in the tree, the next to evict first
        for _ in range(case.num_sequences):
            self.insert_upper_nodes(self.new_sequence())
            self.insert(self.by_last_use[-1])

    def new_sequence(self) -> list[int]:
        """A sequence that differs from all others in its first token."""
        self.num_made += 1
        sequence = [self.num_made, *self.rng.choices(TOKENS, k=self.case.sequence_len - 1)]
        self.by_last_use.append(sequence)
        return sequence

    def insert_upper_nodes(self, sequence: list[int]) -> None:
        for depth in range(1, self.case.depth):
            self.insert(sequence[: depth * self.node_len])

    def insert(self, tokens: list[int]) -> None:
        self.tree.insert(RadixKey(tokens), self.slots[: len(tokens)])

    def cycle(self) -> dict[str, float]:
        """Seconds of one call of each kind."""
        times = {}
        known = self.by_last_use[0]
        key = RadixKey(as_another_request_has_it([*known, -1]))
        times["match"] = _seconds(lambda: self.tree.match_prefix(key))
        self.by_last_use.rotate(-1)

        new = self.new_sequence()
        self.insert_upper_nodes(new)
        new = as_another_request_has_it(new)
        times["insert"] = _seconds(lambda: self.insert(new))

        times["evict"] = _seconds(lambda: self.tree.evict(1))
        num_tokens = self.tree.evict(self.case.sequence_len - self.node_len)
        assert num_tokens == self.case.sequence_len - self.node_len, "one sequence and no more"
        self.by_last_use.popleft()
        return times


def as_another_request_has_it(tokens: list[int]) -> list[int]:
    """Equal numbers as new objects, because Python does not compare an object with itself by value."""
    copied: list[int] = torch.tensor(tokens).tolist()
    return copied


def measure(case: CacheCase, num_repeats: int) -> CacheResult:
    full = FullCache(case)
    cycles = [full.cycle() for _ in range(num_repeats)]
    return CacheResult(case, {name: tuple(times[name] for times in cycles) for name in OPERATIONS})


def _seconds(call: Callable[[], Any]) -> float:
    start = CLOCK()
    call()
    return CLOCK() - start
