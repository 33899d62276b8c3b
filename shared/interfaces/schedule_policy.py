"""Contract of the scheduling policy: the order in which waiting requests are tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from diptych.shared.config import EngineConfig
from diptych.shared.interfaces.prefix_cache import PrefixCache
from diptych.shared.types import Req


class PolicyResult(NamedTuple):
    """One pass over the queue. `order` may be lazy: iterate it once, before the next call of `order`. While
    it is iterated, yielded requests may leave the queue and others join it; it stays a permutation of the
    requests that waited at the call. `deprioritized` is read-only and valid until the next call."""

    order: Iterable[Req]  # a permutation of the waiting queue
    deprioritized: Set[str]  # rids deferred to share a prefix that another request computes in this step


class SchedulePolicy(ABC):
    """Orders the waiting queue. All sorts are stable: ties keep the order of the queue. The queue is any
    sequence of distinct requests; a policy may track a `WaitingQueue` from pass to pass.

    - fcfs: as queued; with priority scheduling: priority (larger first), then queue_start_time;
    - lof: largest max_new_tokens first; with priority scheduling: priority first;
    - random: a permutation drawn from the policy's own seeded generator, request by request as it is walked;
    - routing-key: requests whose routing_key is the most frequent among the running ones first (frequency
      descending, then key), then all others;
    - lpm: longest cached prefix first; more than 128 waiting: as fcfs;
    - dfs-weight: depth first through the prefix tree, at each node the child first whose subtree has the
      most waiting requests (ties: the subtree with the longest waiting request), a node's own requests
      after those of its children.

    lpm and dfs-weight with the cache disabled are fcfs.

    In-batch prefix caching (lpm, dfs-weight): a request that finds at most
    `in_batch_prefix_check_threshold` tokens in the cache and at least
    `in_batch_prefix_deprioritize_threshold` in common with an earlier request of the queue that is computed
    in this step is ordered last and listed in `deprioritized`: one step later the prefix is cached.
    """

    @abstractmethod
    def __init__(self, config: EngineConfig, tree_cache: PrefixCache) -> None: ...

    @abstractmethod
    def order(self, waiting_queue: Sequence[Req], running: Sequence[Req]) -> PolicyResult:
        """Does not change the queue. May update access times in the prefix cache (it matches the whole key;
        admission matches again with the capped key)."""
