"""Contract of the scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces.draft_tree import DraftTreeOps
from diptych.shared.interfaces.drafter import Drafter
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool, TokenToKVPoolAllocator
from diptych.shared.interfaces.model_runner import ModelRunner
from diptych.shared.interfaces.prefill_adder import PrefillAdder
from diptych.shared.interfaces.prefix_cache import PrefixCache
from diptych.shared.interfaces.sampler import Sampler
from diptych.shared.interfaces.schedule_policy import SchedulePolicy
from diptych.shared.timeline import Timeline
from diptych.shared.types import Req, SpeculationStats, StepOutput


class SchedulerFeature:
    """A feature of the engine that takes part in the scheduler's loop, at the moments that it overrides. Only
    an engine that has the feature has the object (LoRA adapters, a tier below the prefix cache, preemption
    by priority, drafts), and the scheduler does not know which features there are."""

    def num_reserved(self, running: Sequence[Req]) -> int:
        """Tokens that admission leaves free, so that the running requests can go on decoding as they do."""
        return 0

    def is_waiting(self, req: Req) -> None:
        """The request has come, and waits."""

    def may_join(self, req: Req, running: Sequence[Req], new: Sequence[Req]) -> bool:
        """Whether a waiting request may run beside the running ones and those that join with it. False ends
        the admission of this step, because other requests must not overtake this one for ever."""
        return True

    def is_joining(self, req: Req) -> None:
        """The request is the next one to be admitted, if it fits."""

    def makes_room(self, req: Req, adder: PrefillAdder) -> bool:
        """The request does not fit. True: there is more room now, and it is tried again."""
        return False

    def have_joined(self, new: Sequence[Req], running: Sequence[Req]) -> None:
        """The new requests are in the next batch, and own rows and slots."""

    def has_come(self, req: Req, first_token: int, draft_state: bytes) -> None:
        """The request joins with the KV of its prompt, which another engine has computed, as it has the first
        token of its answer. The slots behind `cache_protected_len` are not in the prefix cache yet.
        draft_state: the `state_of` the request of the other engine's drafter."""

    def has_left(self, req: Req) -> None:
        """The request ends or is retracted. It still owns its memory."""

    def engine_ends(self) -> None:
        """The engine of a server has been stopped, without an error. The process ends after this."""

    def check(self) -> None:
        """Raise `AssertionError` if the state of the feature contradicts itself. Called after a step if
        invariants are checked."""


@dataclass(frozen=True)
class SchedulerParts:
    """The components that a scheduler uses. The engine assembles them."""

    model_runner: ModelRunner
    sampler: Sampler
    req_to_token_pool: ReqToTokenPool
    allocator: TokenToKVPoolAllocator
    tree_cache: PrefixCache
    policy: SchedulePolicy
    prefill_adder: type[PrefillAdder]
    num_token_ids: int  # ids [0, num_token_ids) have a token; further rows of the head are padding
    decode_text: Callable[[list[int]], str]  # ids to text, special tokens included (for stop strings)
    clock: Callable[[], float]  # seconds, monotonic
    drafter: Drafter | None = None  # None: no speculation; otherwise the next two are required
    draft_tree: DraftTreeOps | None = None
    kv_pool: TokenToKVPool | None = None  # of the target
    reward_head: torch.Tensor | None = None  # [num_labels, hidden_size] float32 on the CPU, of a reward model
    timeline: Timeline = field(default_factory=Timeline)  # off unless a trace is recorded
    features: tuple[SchedulerFeature, ...] = ()  # the scheduler calls each at its moments


class SchedulerStats(NamedTuple):
    num_waiting: int
    num_running: int
    num_steps: int
    num_prompt_tokens: int  # prompt tokens of all requests admitted so far
    num_cached_tokens: int  # of these, found in the prefix cache
    num_generated_tokens: int
    num_retractions: int
    new_token_ratio: float
    speculation: SpeculationStats = SpeculationStats()
    num_used_tokens: int = 0  # slots of the KV pool that are not free
    num_evictable_tokens: int = 0  # of these, in cached prefixes that no request holds
    num_compiled_kernels: int = 0  # after the start; the engine fills it in
    num_overlapped: int = 0  # steps that were launched while the step before was in flight


@dataclass
class SchedulerState:
    """Where each request is, for checkers, statistics and drawings. A request is in exactly one place."""

    waiting_queue: list[Req] = field(default_factory=list)
    # Decoding, or prefilled in the last step; the newest token of each may be in flight.
    running: list[Req] = field(default_factory=list)
    chunked_req: Req | None = None  # chunked prompt, continues in the next step


class Scheduler(ABC):
    """Continuous batching: each `step` runs one batch, prefill before decode.

    A request enters by `add_request` and leaves by exactly one StepOutput with a finished_reason; then it
    owns no memory. A failing request does not affect others.

    With a drafter (`SchedulerParts.drafter`) a decode step verifies drafts where memory allows, and gives a
    request one token or more. Text, finish reasons and log-probabilities are the same as without, at any
    temperature and with every parameter. The scheduler calls the drafter as its contract demands. A scheduler
    that cannot speculate refuses a drafter (`ValueError`).
    """

    overlaps: bool = False
    """Whether `step` launches a batch before it processes the results of the batch before. Then tokens are
    reported one step later."""
    problem: str | None = None
    """Why the engine cannot go on: it ends when it has no work."""
    not_ready: str | None = None
    """Why requests that come now would end with an error, though those that come later may not."""
    num_replicas: int = 1
    """Engines that share the requests and have not ended."""

    @abstractmethod
    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None: ...

    @abstractmethod
    def add_request(self, req: Req) -> None:
        """Queue a request. Raises `ValueError`, before any memory is taken, when its rid is in use (until its
        end was reported), when its prompt is empty or leaves no room for one output token in the context
        or in the KV pool, or when an id is outside the vocabulary. max_new_tokens is clamped so that
        prompt + output fits.

        If the queue is full (max_queued_requests), the new request ends with FinishAbort(status=503) in the
        next step's output; with priority scheduling a waiting request of strictly lower priority, if any."""

    def add_computed(self, req: Req, first: StepOutput, draft_state: bytes = b"") -> None:
        """Add a request whose prompt another engine has computed: it runs, and no token of the prompt is
        computed here. `first` is the output of that engine, with the first token (and log-probabilities, or
        the embedding); it is reported by the next step. draft_state: the `state_of` the request of that
        engine's drafter, whose KV of the prompt is in the same slots. The caller gives up its slots of the
        prompt's KV, `req.prefix_indices`, and its lock of `req.last_node`, which has the first
        `req.cache_protected_len` of them. It gives up `req.req_pool_idx`, if it has taken a row, which with
        linear attention has the state at the end of the prompt; else a row must be free. Memory for the
        prompt and the longest answer must be kept free: it is the caller who admits. Raises `ValueError` as
        `add_request` does for an id in use."""
        raise ValueError(f"{type(self).__name__} cannot continue prompts of another engine")

    @abstractmethod
    def abort(self, rid: str) -> bool:
        """End a request, in any state, with FinishAbort in the next step's output (a token in flight is
        dropped). The rid must match exactly. False if there is no such request or it has ended."""

    @abstractmethod
    def retract(self, rid: str) -> bool:
        """Return a running or partly prefilled request to the waiting queue: its tokens stay, its memory is
        freed, and it is computed again later. The scheduler calls this when memory is short; it is public
        so that tests can force it. False if the request is not running."""

    @abstractmethod
    def step(self) -> list[StepOutput]:
        """Launch one batch, if there is work, and return the outputs that are known: of this batch, or,
        if the scheduler `overlaps`, of the previous one while this one runs. Every request with work is
        in a batch within a bounded number of calls. An exception from the model ends the requests of that
        batch with FinishError, after the tokens of the previous batch. Other requests continue.

        An exception while results are processed ends the requests of that batch in the same way, and none
        of its KV is cached. KeyboardInterrupt does so too, and is raised. An exception while a batch is
        formed is raised; all requests end with FinishError, and the pools and the prefix cache start
        empty."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` can still produce outputs."""

    @abstractmethod
    def flush_cache(self) -> bool:
        """Empty the prefix cache and the pools. Refused (False) unless idle."""

    def forget_kv(self) -> list[StepOutput]:
        """Forget all KV, because the weights that have computed it change. Batches in flight are processed,
        and their outputs returned; running requests go back to the queue as by `retract`; the prefix cache
        and the pools are emptied. Raises `ValueError` where requests run in other processes too."""
        raise ValueError(f"{type(self).__name__} cannot forget the KV of requests that run")

    @abstractmethod
    def state(self) -> SchedulerState:
        """A snapshot."""

    @abstractmethod
    def stats(self) -> SchedulerStats: ...

    def close(self) -> None:  # noqa: B027
        """End what runs beside the scheduler. Nothing is called afterwards."""
