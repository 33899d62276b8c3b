"""Contract of the prefill adder: admission of waiting requests to a prefill step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from diptych.shared.interfaces.memory_pool import TokenToKVPoolAllocator
from diptych.shared.interfaces.prefix_cache import PrefixCache
from diptych.shared.types import Req

CLIP_MAX_NEW_TOKENS = 4096
"""Upper limit of output tokens that admission reserves: a huge max_new_tokens would starve other requests."""

MAX_WAITS = 128
"""Limit of requests per step that wait for a shared prefix: trying more of the queue costs more than a fuller
step saves."""


class AddReqResult(Enum):
    CONTINUE = auto()  # added; more may follow
    NO_TOKEN = auto()  # the KV pool has no room: stop, and try again only after memory is freed
    OTHER = auto()  # the step's budget of prompt tokens is used up: stop
    WAIT = auto()  # this step computes a prefix that it shares: skip it until the next step


@dataclass(frozen=True)
class PrefillBudget:
    """Limits of one step. `num_mixed_decode_tokens`: decode tokens that share the step (mixed chunks).
    `num_reserved_tokens`: kept free for drafts of running requests. `in_batch_prefix_threshold`: minimum
    length of a shared prefix to wait for; None: no request waits."""

    page_size: int
    max_prefill_tokens: int
    chunked_prefill_size: int | None
    new_token_ratio: float
    num_mixed_decode_tokens: int = 0
    num_reserved_tokens: int = 0
    in_batch_prefix_threshold: int | None = None


class PrefillAdder(ABC):
    """Fills one prefill step. A new one is made for each step; results are in the attributes.

    Budgets, in tokens:

    - rem_total = available + evictable - reserved. Reserved at the start: num_mixed_decode_tokens and
      num_reserved_tokens, plus for every running request min(tokens it may still produce,
      CLIP_MAX_NEW_TOKENS) * new_token_ratio; each request added reserves its extension (in whole pages) and,
      when its whole prompt is added, its clipped max_new_tokens unscaled. A chunked request reserves no
      output.
    - rem_input = max_prefill_tokens - num_mixed_decode_tokens, less what was added (in whole pages).
    - rem_chunk = chunked_prefill_size - num_mixed_decode_tokens, less what was added; None: unlimited.

    Adding a request locks its prefix in the cache (`req.last_node`), and sets req.fill_ids,
    req.extend_input_len. A request that is not added is unchanged and unlocked.
    """

    can_run_list: list[Req]
    new_chunked_req: Req | None  # the chunked request, continued in the next step
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
        """Continue a chunked request; called first. It keeps its prefix_indices (no new match). Adds as many
        tokens as rem_chunk and free memory allow, in whole pages unless the prompt ends; no tokens if that
        is less than a page. Returns the request if it must continue, None if this step ends its prompt."""

    @abstractmethod
    def add_one_req(self, req: Req) -> AddReqResult:
        """Try to add a waiting request: match its prefix (at most req.max_prefix_len tokens), then

        - an added request has the same cached prefix and computes at least in_batch_prefix_threshold tokens
          after it (at least one, in whole pages) that this request shares: WAIT. In the next step they are
          in the cache. A step answers WAIT at most MAX_WAITS times, then OTHER. With a disabled cache no
          request waits;
        - extension + clipped max_new_tokens >= rem_total, before or after the prefix is locked: NO_TOKEN
          (locking reduces the evictable size). If nothing runs and nothing was added, only the request's
          own tokens need to fit;
        - extension in whole pages >= rem_input, and something was added: OTHER (the first always fits);
        - extension in whole pages <= rem_chunk: added whole;
        - otherwise cut to rem_chunk rounded down to whole pages; OTHER if that is zero.
        """

    @abstractmethod
    def preempt_to_schedule(self, req: Req, min_priority_gap: int) -> list[Req]:
        """Running requests to preempt so that `req` fits: those whose priority is lower by more than
        `min_priority_gap`, lowest first, then the most recently queued first, as few as needed. A request
        frees its reservation and the slots that it alone owns, [cache_protected_len, kv_allocated_len): its
        prefix in the cache may be shared. Empty if they do not suffice. Their reservations are removed from
        the budget; the caller retracts them, requeues them, and tries `req` again."""
