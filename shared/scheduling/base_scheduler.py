"""What the schedulers of both panels do alike: requests come and go, are admitted, retracted and ended."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import (
    AddReqResult,
    PrefillAdder,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
)
from diptych.shared.interfaces import scheduler as interface
from diptych.shared.scheduling.admission import NewTokenRatio, admit, budget_of_step, overdue, turned_away
from diptych.shared.scheduling.host_cache import HostCache
from diptych.shared.scheduling.invariants import check_invariants
from diptych.shared.scheduling.lora_slots import LoraSlots
from diptych.shared.scheduling.pages import mix, prepare_for_extend, retraction_order
from diptych.shared.scheduling.stop_conditions import append_tokens
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.types import (
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
    """How running requests decode: one token each, or drafts that the model verifies."""

    def num_reserved(self, reqs: Sequence[Req]) -> int:
        """Tokens that admission leaves free, so that these requests can go on decoding as they do."""

    def prepare(self, reqs: list[Req]) -> ScheduleBatch | None:
        """Slots for a decode step of all of them. None: there is no memory for it."""

    def drop(self, req: Req) -> None:
        """The request ends or is retracted: forget what is kept for it."""

    def stats(self, num_accepted_tokens: int) -> SpeculationStats: ...


class BaseScheduler(interface.Scheduler):
    """A panel adds the loop: `step`, what it runs, and how results are processed.

    A request is in `waiting_queue`, in `running`, or is `chunked_req`; `live` has all of them by id."""

    decoding: DecodeStrategy

    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        self.config = config
        self.model_config = model_config
        self.parts = parts
        self.context_len = config.context_len or model_config.context_len
        self.waiting_queue: list[Req] | WaitingQueue = []
        self.running: list[Req] = []
        self.num_in_flight = 0  # requests whose prompt a pipeline computes: not in `running` yet
        self.chunked_req: Req | None = None
        self.live: dict[str, Req] = {}
        self.outputs: list[StepOutput] = []  # for the next return of step()
        self.batch_is_full = False  # no memory for more requests until one leaves
        self.host: HostCache | None = getattr(parts.tree_cache, "host", None)
        self.lora = LoraSlots(parts.lora) if parts.lora is not None else None
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        # Totals, for `stats`.
        self.num_steps = 0
        self.num_prompt_tokens = 0  # of all requests admitted so far
        self.num_cached_tokens = 0  # those of them that came from the prefix cache
        self.num_generated_tokens = 0
        self.num_accepted_tokens = 0  # those of them that speculation gave in addition
        self.num_retractions = 0

    # ---- requests come and go ----

    def add_request(self, req: Req) -> None:
        if req.rid in self.live or any(req.rid == output.rid for output in self.outputs):
            raise ValueError(f"request id {req.rid!r} is in use")
        admit(req, self.model_config.vocab_size, self.context_len, self.parts.allocator.size)
        if req.diffusion is not None:
            self._decode_blocks()
        req.arrival_time = req.queue_start_time = self.parts.clock()
        self.live[req.rid] = req
        self.waiting_queue.append(req)
        if self.config.enable_priority_scheduling:
            self.batch_is_full = False  # it may preempt
        limit = self.config.max_queued_requests
        if limit is not None and len(self.waiting_queue) > limit:
            reason = FinishAbort(f"the queue is full ({limit} waiting)", 503)
            self._finish(turned_away(self.waiting_queue, self.config), reason)

    def _decode_blocks(self) -> None:
        """From now on, decode requests with block diffusion too."""
        raise ValueError("block diffusion needs scheduler=reference")

    def abort(self, rid: str) -> bool:
        req = self.live.get(rid)
        if req is None:
            return False
        self._finish(req, FinishAbort("aborted"))
        return True

    def retract(self, rid: str) -> bool:
        req = self.live.get(rid)
        if req is None or req.req_pool_idx is None:
            return False
        self._retract(req)
        return True

    def has_work(self) -> bool:
        return bool(self.live or self.outputs)

    # ---- which batch ----

    def _schedule(self) -> ScheduleBatch | None:
        with self.parts.timeline.span("schedule"):
            try:
                return self.get_next_batch_to_run()
            except BaseException as error:
                self._abandon(error)
                raise

    # --8<-- [start:get-next-batch]
    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Prefill first: waiting costs latency, and a larger running batch is efficient."""
        prefill = self._get_new_batch_prefill()
        if prefill is None:
            return self._get_batch_decode()
        decodable = self._decodable() if self.config.enable_mixed_chunk else []
        decode = self.decoding.prepare(decodable) if decodable else None
        return prefill if decode is None else mix(prefill, decode)

    # --8<-- [end:get-next-batch]

    @abstractmethod
    def _get_batch_decode(self) -> ScheduleBatch | None:
        """A decode step, after retractions if memory is short."""

    def _decodable(self) -> list[Req]:
        """The running requests that take part in the next decode step."""
        return self.running

    def _get_new_batch_prefill(self) -> ScheduleBatch | None:
        if self.chunked_req is None and (self.batch_is_full or not self.waiting_queue):
            return None
        parts, decodable = self.parts, self._decodable()
        num_reserved = self.decoding.num_reserved(decodable)
        adder = parts.prefill_adder(
            budget_of_step(self.config, self.new_token_ratio.current, len(decodable), num_reserved),
            parts.tree_cache,
            parts.allocator,
            decodable,
        )
        if self.chunked_req is not None:
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
        if self.chunked_req is None and not self.batch_is_full:
            self._add_waiting(adder)
        if not adder.can_run_list:
            return None

        for req in adder.can_run_list:
            if req.run_start_time is None:  # a retracted request has counted
                req.run_start_time = parts.clock()
                req.num_cached_tokens = len(req.prefix_indices)
                self.num_prompt_tokens += len(req.origin_input_ids)
                self.num_cached_tokens += req.num_cached_tokens
        if adder.new_chunked_req is not None:
            self.chunked_req = adder.new_chunked_req
        batch = prepare_for_extend(
            adder.can_run_list, parts.req_to_token_pool, parts.allocator, parts.tree_cache
        )
        if self.lora is not None:
            self.lora.place(adder.can_run_list, self._with_memory(adder))
        return batch

    def _with_memory(self, adder: PrefillAdder) -> list[Req]:
        """The requests that may be in a batch with those of this step."""
        return [*self.running, *adder.can_run_list, *([self.chunked_req] if self.chunked_req else [])]

    def _add_waiting(self, adder: PrefillAdder) -> None:
        order, deprioritized = self.parts.policy.order(self.waiting_queue, self.running)
        for req in order:
            if req.rid in deprioritized and adder.can_run_list:
                break  # one step later it finds its prefix in the cache
            if self.lora is not None and not self.lora.admits(req, self._with_memory(adder)):
                break  # until an adapter of the running requests is done: others must not overtake for ever
            num_running = len(self.running) + self.num_in_flight + len(adder.can_run_list)
            if num_running >= self.config.max_running_requests:
                result = AddReqResult.NO_TOKEN
            else:
                if self.host is not None:
                    self.host.load(req, self.parts.tree_cache, self.parts.allocator)
                result = adder.add_one_req(req)
            if result is AddReqResult.WAIT:
                continue
            if result is AddReqResult.NO_TOKEN and self._preempt_for(req, adder):
                result = adder.add_one_req(req)
            if result is not AddReqResult.CONTINUE:
                # After an addition it is worth another try: the next step's budget reserves for what was
                # added now only the expected output, not the longest.
                self.batch_is_full = result is AddReqResult.NO_TOKEN and not adder.can_run_list
                break
            self.waiting_queue.remove(req)
            if adder.new_chunked_req is not None:
                break

    def _preempt_for(self, req: Req, adder: PrefillAdder) -> bool:
        if not self.config.enable_priority_scheduling:
            return False
        victims = adder.preempt_to_schedule(req, self.config.priority_preemption_threshold)
        for victim in victims:
            self._retract(victim)
        return bool(victims)

    def _retract_to_decode(self) -> ScheduleBatch:
        """Retract requests until the others can decode. The last one stays: a chunked prompt is retracted
        before it, and alone it fits, because submission checked that."""
        candidates = retraction_order(self.running)
        while (batch := self.decoding.prepare(self._decodable())) is None:
            if len(candidates) > 1:
                self._retract(candidates.pop())
            else:
                assert self.chunked_req is not None, "one request alone does not fit: submission checks this"
                self._retract(self.chunked_req)
        self.new_token_ratio.raise_after_retraction(self.running)
        return batch

    # ---- the end of a request, or of its turn ----

    def _append_tokens(self, req: Req, token_ids: list[int], logprobs: list[TokenLogprob]) -> None:
        num_new = append_tokens(req, token_ids, logprobs, self.parts.decode_text, self.parts.num_token_ids)
        if num_new > 0:
            req.kv_committed_len -= len(token_ids) - num_new  # what was accepted behind its end
        num_accepted = max(num_new - 1, 0)
        req.num_accepted_tokens += num_accepted
        self.num_accepted_tokens += num_accepted
        self.num_generated_tokens += num_new
        if req.finished_reason is not None:
            self._finish(req, req.finished_reason)
        else:
            self.outputs.append(req.step_output())

    def _finish(self, req: Req, reason: FinishReason) -> None:
        """Release everything and report: the one place where a request ends."""
        req.finished_reason = reason
        self._release(req, is_insert=not isinstance(reason, FinishError))
        del self.live[req.rid]
        self.batch_is_full = False
        self.outputs.append(req.step_output())

    def _finish_overdue(self) -> None:
        if self.config.waiting_timeout is None and self.config.running_timeout is None:
            return
        now = self.parts.clock()
        for req in list(self.live.values()):
            reason = overdue(req, self.config, now)
            if reason is not None:
                self._finish(req, reason)

    def _finish_with_error(self, reqs: Sequence[Req], error: BaseException) -> None:
        """End what is left of a batch. None of the KV that it computed is cached."""
        alive = [req for req in reqs if self.live.get(req.rid) is req]
        for req in alive:
            req.drop_unreported()
            self._finish(req, FinishError(f"{type(error).__name__}: {error}"))
        if not alive or not isinstance(error, Exception):
            raise error  # no request can report it; or an interrupt: the batch is lost, the engine is not

    def _abandon(self, error: BaseException) -> None:
        """An error while a batch is formed: it is not known which memory belongs to whom. All requests end,
        and the pools and the prefix cache start empty."""
        for req in self.live.values():
            req.finished_reason = FinishError(f"{type(error).__name__}: {error}")
            self.decoding.drop(req)
            if req in self.waiting_queue:
                self.waiting_queue.remove(req)
            self.outputs.append(req.step_output())
            req.reset_for_retraction()
        self.live.clear()
        self.running.clear()
        self.chunked_req, self.batch_is_full = None, False
        self.flush_cache()

    def _retract(self, req: Req) -> None:
        self._release(req, is_insert=False)
        req.reset_for_retraction()
        req.queue_start_time = self.parts.clock()
        self.waiting_queue.append(req)
        self.num_retractions += 1
        self.batch_is_full = False

    def _release(self, req: Req, is_insert: bool) -> None:
        """Take the request out of its place, and free its memory."""
        if req is self.chunked_req:
            self.chunked_req = None
        elif req in self.running:
            self.running.remove(req)
        elif req in self.waiting_queue:
            self.waiting_queue.remove(req)
        self.decoding.drop(req)
        if req.req_pool_idx is not None:
            self.parts.tree_cache.cache_finished_req(req, is_insert)

    # ---- inspection ----

    def flush_cache(self) -> bool:
        if self.live:
            return False
        self.parts.tree_cache.reset()
        self.parts.allocator.clear()
        self.parts.req_to_token_pool.clear()
        return True

    def state(self) -> SchedulerState:
        return SchedulerState(list(self.waiting_queue), list(self.running), self.chunked_req)

    def stats(self) -> SchedulerStats:
        allocator = self.parts.allocator
        return SchedulerStats(
            num_waiting=len(self.waiting_queue),
            num_running=len(self.running) + (self.chunked_req is not None),
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_retractions=self.num_retractions,
            new_token_ratio=self.new_token_ratio.current,
            speculation=self.decoding.stats(self.num_accepted_tokens),
            num_used_tokens=allocator.size - allocator.available_size(),
            num_evictable_tokens=self.parts.tree_cache.evictable_size(),
        )

    def _take_outputs(self) -> list[StepOutput]:
        """What the step reports, once its end state is checked (if the configuration asks for it)."""
        if self.config.check_invariants or (self.config.check_idle and not self.live):
            parts = self.parts
            check_invariants(self.state(), parts.allocator, parts.req_to_token_pool, parts.tree_cache)
            if self.host is not None:
                self.host.check()
        outputs, self.outputs = self.outputs, []
        return outputs
