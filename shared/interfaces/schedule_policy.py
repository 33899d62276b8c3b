"""Contract of the scheduling policy: the order in which waiting requests are tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from shared.config import EngineConfig
from shared.interfaces.prefix_cache import PrefixCache
from shared.types import Req


class PolicyResult(NamedTuple):
    """One pass over the queue. `order` may be lazy: walk it once, before the next call of `order`. Meanwhile
    the requests that it gave may leave the queue, and others join it: it stays a permutation of those that
    waited at the call. `deprioritized` is not to be changed, and holds until the next call."""

    order: Iterable[Req]  # a permutation of the waiting queue
    deprioritized: Set[str]  # rids put off to share a prefix that another request computes now


class SchedulePolicy(ABC):
    """Orders the waiting queue. All sorts are stable: ties keep the order of the queue. The queue is any
    sequence of distinct requests; one that is a `WaitingQueue` may be followed from pass to pass.

    - fcfs: as queued; with priority scheduling: priority (larger first), then queue_start_time;
    - lof: largest max_new_tokens first; with priority scheduling: priority first;
    - random: a permutation drawn from the policy's own seeded generator, request by request as it is walked;
    - routing-key: requests whose routing_key is the most frequent among the running ones first (frequency
      descending, then key), the others after them;
    - lpm: longest cached prefix first; more than 128 waiting: as fcfs;
    - dfs-weight: depth first through the prefix tree, at each node the child first whose subtree has the
      most waiting requests (among equals the one with the request that waits longest), a node's own requests
      after those of its children.
    lpm and dfs-weight with the cache disabled are fcfs.

    In-batch prefix caching (lpm, dfs-weight): a request that finds at most
    `in_batch_prefix_check_threshold` tokens in the cache and at least
    `in_batch_prefix_deprioritize_threshold` in common with one before it in the queue (itself computed
    now) goes last, and is listed in `deprioritized`: one step later it finds the prefix in the cache.
    """

    @abstractmethod
    def __init__(self, config: EngineConfig, tree_cache: PrefixCache) -> None: ...

    @abstractmethod
    def order(self, waiting_queue: Sequence[Req], running: Sequence[Req]) -> PolicyResult:
        """The queue itself is not changed. May touch the prefix cache's access times (it probes with the
        whole key: admission matches again, capped, and that match counts)."""
