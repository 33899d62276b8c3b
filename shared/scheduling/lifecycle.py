"""The life of requests in a scheduler, apart from its loop: they come, take turns, end, and are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import SchedulerFeature, SchedulerParts, SchedulerState, SchedulerStats
from diptych.shared.sampling.logprobs import cut_top
from diptych.shared.scheduling.admission import Preemption, admit, overdue, turned_away
from diptych.shared.scheduling.invariants import check_invariants
from diptych.shared.scheduling.stop_conditions import check_finished
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.types import (
    BatchResult,
    FinishAbort,
    FinishError,
    FinishReason,
    Req,
    ScheduleBatch,
    SpeculationStats,
    StepOutput,
    TokenLogprob,
)


class DecodeStrategy(Protocol):
    """How running requests decode: one token each, or drafts that the model verifies. It may be a
    `SchedulerFeature`."""

    def prepare(self, reqs: list[Req], most_steps: int | None = None) -> ScheduleBatch | None:
        """Slots for a decode step of all these requests, or for several steps. None: there is no memory for
        it."""

    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> BatchResult | None:
        """Run a batch. chunked_req: the request whose prompt continues in the next step. None: the results
        come later."""

    def stats(self, num_accepted_tokens: int) -> SpeculationStats: ...


class Lifecycle:
    """The requests of a scheduler. Each is in `waiting_queue`, in `running`, or is `chunked_req`; `live` has
    all of them by id."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parts: SchedulerParts,
        decoding: DecodeStrategy,
        waiting_queue: list[Req] | WaitingQueue,
    ) -> None:
        self.config = config
        self.parts = parts
        self.vocab_size = model_config.vocab_size
        self.context_len = config.context_len or model_config.context_len
        self.decoding = decoding
        self.features: list[SchedulerFeature] = [*parts.features]
        if isinstance(decoding, SchedulerFeature):
            self.features.append(decoding)
        if config.enable_priority_scheduling:
            self.features.append(Preemption(config.priority_preemption_threshold, self.retract))
        self.waiting_queue = waiting_queue
        self.running: list[Req] = []
        self.chunked_req: Req | None = None  # its prompt is computed in part
        self.live: dict[str, Req] = {}
        self.outputs: list[StepOutput] = []  # for the next return of step()
        self.batch_is_full = False  # no memory for more requests until one leaves
        # Totals, for `stats`.
        self.num_steps = 0
        self.num_prompt_tokens = 0  # of all requests admitted so far
        self.num_cached_tokens = 0  # those of them that came from the prefix cache
        self.num_generated_tokens = 0
        self.num_accepted_tokens = 0  # those of them that speculation gave in addition
        self.num_retractions = 0
        self.num_overlapped = 0  # steps launched while another was in flight

    # ---- requests come ----

    def add(self, req: Req) -> None:
        self._register(req)
        self.waiting_queue.append(req)
        if self.config.enable_priority_scheduling:
            self.batch_is_full = False  # it may preempt
        for feature in self.features:
            feature.is_waiting(req)
        limit = self.config.max_queued_requests
        if limit is not None and len(self.waiting_queue) > limit:
            reason = FinishAbort(f"the queue is full ({limit} waiting)", 503)
            self.finish(turned_away(self.waiting_queue, self.config), reason)

    # --8<-- [start:add-computed]
    def add_computed(self, req: Req, first: StepOutput, draft_state: bytes) -> None:
        """Let a request run whose prompt has KV, as after a prefill step."""
        self._register(req)
        if req.req_pool_idx is None:
            rows = self.parts.req_to_token_pool.alloc(1)
            assert rows is not None, "no row for a request: the caller admits it"
            req.req_pool_idx = rows[0]
        self.parts.req_to_token_pool.write(req.req_pool_idx, 0, req.prefix_indices)
        req.fill_ids = req.origin_input_ids
        req.kv_matched_len = req.kv_committed_len = req.kv_allocated_len = len(req.fill_ids)
        req.input_logprobs, req.embedding = first.input_logprobs, first.embedding
        self._count(req, max(first.num_cached_tokens, req.cache_protected_len))
        first_token = max(first.new_token_ids[-1], 0) if first.new_token_ids else 0  # NaN: its request ends
        for feature in self.features:
            feature.has_come(req, first_token, draft_state)
        self.parts.tree_cache.cache_unfinished_req(req)
        for feature in self.features:
            feature.have_joined([req], self.running)
        self.running.append(req)
        self.append_tokens(req, first.new_token_ids, first.output_logprobs)

    # --8<-- [end:add-computed]

    def _register(self, req: Req) -> None:
        if req.rid in self.live or any(req.rid == output.rid for output in self.outputs):
            raise ValueError(f"request id {req.rid!r} is in use")
        admit(req, self.vocab_size, self.context_len, self.parts.allocator.size)
        req.arrival_time = req.queue_start_time = self.parts.clock()
        self.live[req.rid] = req

    def have_started(self, reqs: Sequence[Req]) -> None:
        """Count the requests that are in a batch for the first time."""
        for req in reqs:
            if req.run_start_time is None:  # a retracted request has counted
                self._count(req, len(req.prefix_indices))

    def _count(self, req: Req, num_cached_tokens: int) -> None:
        req.run_start_time = self.parts.clock()
        req.num_cached_tokens = num_cached_tokens
        self.num_prompt_tokens += len(req.origin_input_ids)
        self.num_cached_tokens += num_cached_tokens

    # ---- their tokens, and their end ----

    def append_tokens(self, req: Req, token_ids: list[int], logprobs: list[TokenLogprob]) -> None:
        """Append what a step gave a request, up to its end."""
        num_before = len(req.output_ids)
        req.output_ids += token_ids
        if req.sampling_params.return_logprob:
            req.output_logprobs += [cut_top(logprob, req) for logprob in logprobs]
        check_finished(req, len(token_ids), self.parts.decode_text, self.parts.num_token_ids)
        if req.finished_len is not None:
            del req.output_ids[req.finished_len :]  # behind its end, or a NaN's id: no output
            del req.output_logprobs[req.finished_len :]
        num_new = len(req.output_ids) - num_before
        if num_new > 0:
            req.kv_committed_len -= len(token_ids) - num_new  # what was accepted behind its end
        num_accepted = max(num_new - 1, 0) if self.parts.drafter is not None else 0
        req.num_accepted_tokens += num_accepted
        self.num_accepted_tokens += num_accepted
        self.num_generated_tokens += num_new
        if req.finished_reason is not None:
            self.finish(req, req.finished_reason)
        else:
            self.outputs.append(req.step_output())

    def finish(self, req: Req, reason: FinishReason) -> None:
        """Release everything and report: the one place where a request ends."""
        req.finished_reason = reason
        self._release(req, is_insert=not isinstance(reason, FinishError))
        del self.live[req.rid]
        self.batch_is_full = False
        self.outputs.append(req.step_output())

    def abort(self, rid: str) -> bool:
        req = self.live.get(rid)
        if req is None:
            return False
        self.finish(req, FinishAbort("aborted"))
        return True

    def finish_overdue(self) -> None:
        if self.config.waiting_timeout is None and self.config.running_timeout is None:
            return
        now = self.parts.clock()
        for req in list(self.live.values()):
            reason = overdue(req, self.config, now)
            if reason is not None:
                self.finish(req, reason)

    def finish_with_error(self, reqs: Sequence[Req], error: BaseException) -> None:
        """End what is left of a batch. None of the KV that it computed is cached."""
        alive = [req for req in reqs if self.live.get(req.rid) is req]
        for req in alive:
            req.drop_unreported()
            self.finish(req, FinishError(f"{type(error).__name__}: {error}"))
        if not alive or not isinstance(error, Exception):
            raise error  # no request can report it; or an interrupt: the batch is lost, the engine is not

    def abandon(self, error: BaseException) -> None:
        """An error while a batch is formed: the owners of memory are unknown. All requests end, and the pools
        and the prefix cache start empty."""
        for req in self.live.values():
            req.finished_reason = FinishError(f"{type(error).__name__}: {error}")
            for feature in self.features:
                feature.has_left(req)
            if req in self.waiting_queue:
                self.waiting_queue.remove(req)
            self.outputs.append(req.step_output())
            req.reset_for_retraction()
        self.live.clear()
        self.running.clear()
        self.chunked_req, self.batch_is_full = None, False
        self.flush_cache()

    # ---- back to the queue ----

    def retract(self, req: Req) -> None:
        """Free the memory of a request and let it wait again. Its tokens stay."""
        self._release(req, is_insert=False)
        req.reset_for_retraction()
        req.queue_start_time = self.parts.clock()
        self.waiting_queue.append(req)
        self.num_retractions += 1
        self.batch_is_full = False

    def retract_by_id(self, rid: str) -> bool:
        req = self.live.get(rid)
        if req is None or req.req_pool_idx is None:
            return False
        self.retract(req)
        return True

    def _release(self, req: Req, is_insert: bool) -> None:
        """Take the request out of its place, and free its memory."""
        if req is self.chunked_req:
            self.chunked_req = None
        elif req in self.running:
            self.running.remove(req)
        elif req in self.waiting_queue:
            self.waiting_queue.remove(req)
        for feature in self.features:
            feature.has_left(req)
        if req.req_pool_idx is not None:
            self.parts.tree_cache.cache_finished_req(req, is_insert)

    # ---- inspection ----

    def flush_cache(self) -> bool:
        if self.live:
            return False
        self._reset_pools()
        return True

    def forget_kv(self) -> list[StepOutput]:
        """Retract what runs, and empty the prefix cache and the pools. No batch may be in flight."""
        for req in [*self.running, *([self.chunked_req] if self.chunked_req is not None else [])]:
            self.retract(req)
        self._reset_pools()
        return self.take_outputs()

    def _reset_pools(self) -> None:
        self.parts.tree_cache.reset()
        self.parts.allocator.clear()
        self.parts.req_to_token_pool.clear()

    def state(self) -> SchedulerState:
        return SchedulerState(list(self.waiting_queue), list(self.running), self.chunked_req)

    def stats(self, new_token_ratio: float) -> SchedulerStats:
        allocator = self.parts.allocator
        return SchedulerStats(
            num_waiting=len(self.waiting_queue),
            num_running=len(self.running) + (self.chunked_req is not None),
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_retractions=self.num_retractions,
            new_token_ratio=new_token_ratio,
            speculation=self.decoding.stats(self.num_accepted_tokens),
            num_used_tokens=allocator.size - allocator.available_size(),
            num_evictable_tokens=self.parts.tree_cache.evictable_size(),
            num_overlapped=self.num_overlapped,
        )

    def take_outputs(self) -> list[StepOutput]:
        """What the step reports, once its end state is checked (if the configuration asks for it)."""
        if self.config.check_invariants or (self.config.check_idle and not self.live):
            parts = self.parts
            check_invariants(self.state(), parts.allocator, parts.req_to_token_pool, parts.tree_cache)
            for feature in self.features:
                feature.check()
        outputs, self.outputs = self.outputs, []
        return outputs
