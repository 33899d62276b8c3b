"""Contract of the scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.config import EngineConfig, ModelConfig
from shared.interfaces.draft_tree import DraftTreeOps
from shared.interfaces.drafter import Drafter
from shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool, TokenToKVPoolAllocator
from shared.interfaces.model_runner import ModelRunner
from shared.interfaces.prefill_adder import PrefillAdder
from shared.interfaces.prefix_cache import PrefixCache
from shared.interfaces.sampler import Sampler
from shared.interfaces.schedule_policy import SchedulePolicy
from shared.timeline import Timeline
from shared.types import Req, SpeculationStats, StepOutput


@dataclass(frozen=True)
class SchedulerParts:
    """What a scheduler works with. The engine assembles it from the chosen components."""

    model_runner: ModelRunner
    sampler: Sampler
    req_to_token_pool: ReqToTokenPool
    allocator: TokenToKVPoolAllocator
    tree_cache: PrefixCache
    policy: SchedulePolicy
    prefill_adder: type[PrefillAdder]
    num_token_ids: int  # ids [0, this) have a token; the model's head may have more rows: padding
    decode_text: Callable[[list[int]], str]  # ids to text, special tokens included (for stop strings)
    clock: Callable[[], float]  # seconds, monotonic
    drafter: Drafter | None = None  # None: no speculation; else the next two are needed as well
    draft_tree: DraftTreeOps | None = None
    kv_pool: TokenToKVPool | None = None  # the target's
    timeline: Timeline = field(default_factory=Timeline)  # off, unless somebody records the steps


class SchedulerStats(NamedTuple):
    num_waiting: int
    num_running: int
    num_steps: int
    num_prompt_tokens: int  # prompt tokens of all requests admitted so far
    num_cached_tokens: int  # those of them that came from the prefix cache
    num_generated_tokens: int
    num_retractions: int
    new_token_ratio: float
    speculation: SpeculationStats = SpeculationStats()


@dataclass
class SchedulerState:
    """Who is where; for checkers, statistics and drawings. A request is in exactly one of the places."""

    waiting_queue: list[Req] = field(default_factory=list)
    # Decoding, or prefilled in the last step; the newest token of each may still be under way.
    running: list[Req] = field(default_factory=list)
    chunked_req: Req | None = None  # prompt cut, goes on in the next step


class Scheduler(ABC):
    """Continuous batching: each `step` runs one batch, prefill before decode.

    A request enters by `add_request` and leaves by exactly one StepOutput with a finished_reason; then it
    owns nothing. Nothing a request does can disturb another one.

    With a drafter (`SchedulerParts.drafter`) a decode step verifies drafts where memory allows, and gives a
    request one token or more. The answers are the same: text, reasons to finish, log-probabilities, at any
    temperature and with every parameter. The drafter is told what its contract says. A scheduler that cannot
    speculate refuses a drafter (`ValueError`).
    """

    @abstractmethod
    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None: ...

    @abstractmethod
    def add_request(self, req: Req) -> None:
        """Queue a request. Raises `ValueError`, before anything is taken, when its rid is in use, when its
        prompt is empty or leaves no room for one output token in the context or in the KV pool, or when an
        id is outside the vocabulary. max_new_tokens is clamped so that prompt + output fits.

        With the queue full (max_queued_requests) the newcomer, or with priority scheduling a strictly less
        important waiting request, ends with FinishAbort(status=503) in the next step's output."""

    @abstractmethod
    def abort(self, rid: str) -> bool:
        """End a request, in whatever state, with FinishAbort in the next step's output (a token in flight
        is dropped). The rid must match exactly. False when there is no such request: it ended already."""

    @abstractmethod
    def retract(self, rid: str) -> bool:
        """Throw a running or half-prefilled request back into the waiting queue: its tokens stay, its
        memory goes, and it is computed again later. What the scheduler does by itself when memory is short;
        public, so that tests can force it. False when the request is not running."""

    @abstractmethod
    def step(self) -> list[StepOutput]:
        """Launch one batch, if there is anything to run, and report what is known: of this batch, or of the
        one before while this one runs. Every request with work gets a step within a bounded number of
        calls. An exception from the model ends the requests of that batch with FinishError, after the tokens
        of the batch before, and leaves the others alone."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` can still produce outputs."""

    @abstractmethod
    def flush_cache(self) -> bool:
        """Empty the prefix cache and the pools. Refused (False) unless idle."""

    @abstractmethod
    def state(self) -> SchedulerState:
        """A snapshot."""

    @abstractmethod
    def stats(self) -> SchedulerStats: ...
