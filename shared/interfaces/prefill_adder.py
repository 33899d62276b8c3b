"""Contract of the prefill adder: which waiting requests fit into this step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from shared.config import EngineConfig
from shared.interfaces.memory_pool import TokenToKVPoolAllocator
from shared.interfaces.prefix_cache import PrefixCache
from shared.types import Req

CLIP_MAX_NEW_TOKENS = 4096
"""The most output tokens that admission reserves for: a huge max_new_tokens would starve everybody else."""

MAX_WAITS = 128
"""Requests that one step lets wait for a prefix: to look at more of the queue costs more than a fuller step
saves."""


class AddReqResult(Enum):
    CONTINUE = auto()  # added; more may follow
    NO_TOKEN = auto()  # the KV pool has no room for it: stop, and do not try again before memory is freed
    OTHER = auto()  # this step's budget of prompt tokens is spent: stop
    WAIT = auto()  # this step computes its prefix for another one: pass over it until the next step


@dataclass(frozen=True)
class PrefillBudget:
    """Limits of one step. `num_mixed_decode_tokens`: decode tokens that share the step (mixed chunks).
    `num_reserved_tokens`: to be left free for running requests' drafts. `in_batch_prefix_threshold`: tokens
    of a prefix that are worth waiting for; None: nobody waits."""

    page_size: int
    max_prefill_tokens: int
    chunked_prefill_size: int | None
    new_token_ratio: float
    num_mixed_decode_tokens: int = 0
    num_reserved_tokens: int = 0
    in_batch_prefix_threshold: int | None = None

    @classmethod
    def of_step(
        cls, config: EngineConfig, new_token_ratio: float, num_running: int, num_reserved_tokens: int = 0
    ) -> PrefillBudget:
        """`num_running`: requests that would decode in this step."""
        return cls(
            page_size=config.page_size,
            max_prefill_tokens=config.max_prefill_tokens,
            chunked_prefill_size=config.chunked_prefill_size,
            new_token_ratio=new_token_ratio,
            num_mixed_decode_tokens=num_running if config.enable_mixed_chunk else 0,
            num_reserved_tokens=num_reserved_tokens,
            in_batch_prefix_threshold=config.in_batch_prefix_deprioritize_threshold,
        )


class PrefillAdder(ABC):
    """Fills one prefill step. Built anew for each step; results are in the attributes.

    Budgets, in tokens:
    - rem_total = available + evictable - reserved. Reserved at the start: num_mixed_decode_tokens and
      num_reserved_tokens, plus for every running request min(tokens it may still produce,
      CLIP_MAX_NEW_TOKENS) * new_token_ratio; each request added reserves its extension (in whole pages) and,
      when it is added to its end, its clipped max_new_tokens unscaled. A request cut into a chunk reserves
      no output.
    - rem_input = max_prefill_tokens - num_mixed_decode_tokens, less what was added (in whole pages).
    - rem_chunk = chunked_prefill_size - num_mixed_decode_tokens, less what was added; None: unlimited.

    Adding a request locks its prefix in the cache (`req.last_node`), and sets req.fill_ids,
    req.extend_input_len. What is not added is left as it was, unlocked.
    """

    can_run_list: list[Req]
    new_chunked_req: Req | None  # the request that was cut: it goes on in the next step
    rem_total_tokens: int
    rem_input_tokens: int
    rem_chunk_tokens: int | None

    @abstractmethod
    def __init__(
        self,
        budget: PrefillBudget,
        tree_cache: PrefixCache,
        allocator: TokenToKVPoolAllocator,
        running: Sequence[Req],
    ) -> None: ...

    @abstractmethod
    def add_chunked_req(self, req: Req) -> Req | None:
        """Go on with a request that was cut before; called first. It keeps its prefix_indices (no new
        match). Takes what rem_chunk and free memory allow, in whole pages unless it reaches the end;
        nothing at all when that is no page: the request is parked, not lost. Returns the request when it
        still has to go on (also when parked), None when this step finishes its prompt."""

    @abstractmethod
    def add_one_req(self, req: Req) -> AddReqResult:
        """Try to add a waiting request: match its prefix (at most req.max_prefix_len tokens), then

        - a request that was added before found as much of its own prefix in the cache, and computes now at
          least in_batch_prefix_threshold tokens behind it (at least one, in whole pages) that this one's
          prefix goes on with: WAIT. In the next step they are in the cache. Of one step that is the answer
          MAX_WAITS times, after that OTHER. A disabled cache has nobody wait;
        - extension + clipped max_new_tokens >= rem_total, before or after the prefix is locked: NO_TOKEN
          (locking shrinks what is evictable). A lone request, nothing running and nothing added, needs only
          its own tokens to fit;
        - extension in whole pages >= rem_input, and something was added: OTHER (the first always passes);
        - extension in whole pages <= rem_chunk: added whole;
        - otherwise cut to rem_chunk rounded down to whole pages; nothing left of it: OTHER.
        """

    @abstractmethod
    def preempt_to_schedule(self, req: Req, min_priority_gap: int) -> list[Req]:
        """Running requests to retract so that `req` fits: those less important than it by more than
        `min_priority_gap`, least important first, among equals the most recently queued first, as few as
        suffice. Empty when they do not suffice: all or nothing. Their reservations are dropped from the
        budget; the caller retracts them, puts them back into the queue, and tries `req` again."""
