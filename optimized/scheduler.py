"""Continuous batching with overlap scheduling: batch N+1 is formed and launched before N's results are read.

Differs from reference: the GPU goes from batch to batch without waiting for the CPU, which forms the next
one and processes the last one meanwhile. A request decodes from a token that the CPU does not have yet
(optimized/overlap/future_map.py). If that token ends it, one token too many was computed: its row is
dropped, and its slot freed with the others; an end by length is known ahead. A prompt is cached when it is
launched: a request that finds it there runs behind it, and begins anew if it comes out as NaN. Loses a step's
overlap when memory is short, and the sampler's where a grammar has to see token N before N+1 is sampled.
Outputs come one step later.
"""

from __future__ import annotations

from optimized.overlap.cached_prompt import CachedPrompt
from optimized.overlap.pipeline import BatchInFlight, InFlight, Pipeline
from optimized.speculative.round import Outcome, RoundInFlight
from optimized.speculative.speculator import Speculator
from shared.config import EngineConfig, ModelConfig
from shared.interfaces import (
    AddReqResult,
    PrefillAdder,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
)
from shared.interfaces import scheduler as interface
from shared.sampling.logprobs import to_token_logprobs
from shared.scheduling.admission import NewTokenRatio, admit, all_overdue, all_turned_away, budget_of_step
from shared.scheduling.counts import SchedulerCounts
from shared.scheduling.invariants import check_invariants
from shared.scheduling.step_memory import (
    evict_for,
    mix,
    num_tokens_to_decode,
    prepare_for_decode,
    prepare_for_extend,
    retraction_order,
)
from shared.scheduling.stop_conditions import append_tokens
from shared.scheduling.waiting_queue import WaitingQueue
from shared.types import (
    FinishAbort,
    FinishError,
    FinishReason,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SampleOutput,
    ScheduleBatch,
    SpeculationStats,
    StepOutput,
    TokenLogprob,
)


class Scheduler(interface.Scheduler):
    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        self.config = config
        self.model_config = model_config
        self.parts = parts
        self.context_len = config.context_len or model_config.context_len
        self.speculator = Speculator(config, self.context_len, parts) if parts.drafter is not None else None
        self.pipeline = Pipeline(parts) if self.speculator is None else self.speculator.pipeline
        self.waiting_queue = WaitingQueue()
        self.running: list[Req] = []
        self.chunked_req: Req | None = None
        self.live: dict[str, Req] = {}
        self.outputs: list[StepOutput] = []  # pending outputs for the next return of step()
        self.batch_is_full = False  # no memory for more requests until one leaves
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self.counts = SchedulerCounts()

    # ---- requests come and go ----

    def add_request(self, req: Req) -> None:
        if req.rid in self.live:
            raise ValueError(f"request id {req.rid!r} is in use")
        admit(req, self.model_config.vocab_size, self.context_len, self.parts.allocator.size)
        req.arrival_time = req.queue_start_time = self.parts.clock()
        self.live[req.rid] = req
        self.waiting_queue.append(req)
        if self.config.enable_priority_scheduling:
            self.batch_is_full = False  # it may preempt
        for turned_away, reason in all_turned_away(self.waiting_queue, self.config):
            self._finish(turned_away, reason)

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

    # --8<-- [start:overlap-step]
    def step(self) -> list[StepOutput]:
        for req, reason in all_overdue(self.live.values(), self.config, self.parts.clock):
            self._finish(req, reason)
        num_ahead = 1 if self.speculator is None else self.speculator.num_ahead(self.running)
        self._catch_up(num_left=num_ahead)
        with self.parts.timeline.span("schedule"):
            batch = self.get_next_batch_to_run()
        is_launched = batch is not None and self._launch(batch)
        self._catch_up(num_left=num_ahead if is_launched else 0)
        if not self.live:
            self._catch_up(num_left=0)  # rows of ended requests: without live requests nothing may run
        if self.config.check_invariants:
            self._check_invariants()
        outputs, self.outputs = self.outputs, []
        return outputs

    # --8<-- [end:overlap-step]

    def _catch_up(self, num_left: int) -> None:
        """Process batches until at most so many are in flight, the oldest first. Between two steps one is; an
        interrupt while waiting can leave two."""
        while len(self.pipeline) > num_left:
            oldest = self.pipeline.batches[0]
            if oldest.results is None:
                self._sample_late(oldest)
                continue
            with self.parts.timeline.span("wait for tokens"):
                result = oldest.results.wait()
            self.pipeline.batches.popleft()
            with self.parts.timeline.span("process results"):
                if isinstance(oldest, RoundInFlight):
                    self._process_round(oldest, result)
                elif isinstance(oldest, BatchInFlight):
                    self.process_batch_result(oldest, oldest.forward_batch, *result)
        if self.pipeline and self.pipeline.batches[0].results is None:
            self._sample_late(self.pipeline.batches[0])

    # ---- which batch ----

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Prefill comes first: a waiting request costs latency, and a larger running batch is efficient."""
        prefill = self._get_new_batch_prefill()
        if prefill is None:
            return self._get_batch_decode()
        decodable = self.pipeline.decodable(self.running) if self.config.enable_mixed_chunk else []
        if decodable and self._has_memory_to_decode(decodable):
            return mix(prefill, self._prepare_for_decode(decodable))
        return prefill

    def _get_new_batch_prefill(self) -> ScheduleBatch | None:
        if self.chunked_req is None and (self.batch_is_full or not self.waiting_queue):
            return None
        decodable = self.pipeline.decodable(self.running)
        num_reserved = self.speculator.num_reserved(decodable) if self.speculator else 0
        adder = self.parts.prefill_adder(
            budget_of_step(self.config, self.new_token_ratio.current, len(decodable), num_reserved),
            self.parts.tree_cache,
            self.parts.allocator,
            decodable,
        )
        if self.chunked_req is not None:
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
        if self.chunked_req is None and not self.batch_is_full:
            self._add_waiting(adder)
        if not adder.can_run_list:
            return None

        for req in adder.can_run_list:
            self.counts.admit(req, self.parts.clock())
        if adder.new_chunked_req is not None:
            self.chunked_req = adder.new_chunked_req
        parts = self.parts
        return prepare_for_extend(
            adder.can_run_list, parts.req_to_token_pool, parts.allocator, parts.tree_cache
        )

    def _add_waiting(self, adder: PrefillAdder) -> None:
        order, deprioritized = self.parts.policy.order(self.waiting_queue, self.running)
        for req in order:
            if req.rid in deprioritized and adder.can_run_list:
                break  # one step later it finds its prefix in the cache
            if len(self.running) + len(adder.can_run_list) >= self.config.max_running_requests:
                result = AddReqResult.NO_TOKEN
            else:
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

    def _get_batch_decode(self) -> ScheduleBatch | None:
        decodable = self.pipeline.decodable(self.running)
        if not decodable:
            return None
        if self.speculator is not None:
            if self.speculator.can_prepare(decodable):
                self.new_token_ratio.decay()
                return self.speculator.prepare(decodable)
            if any(map(self.speculator.is_in_round, decodable)):
                return None  # a plain step has to know where it goes on
            self.speculator.give_back(decodable)
        if self._has_memory_to_decode(decodable):
            self.new_token_ratio.decay()
        elif self.pipeline:
            return None  # it may end requests: process it before any is retracted
        else:
            decodable = self._retract_to_decode()
        return self._prepare_for_decode(decodable)

    def _prepare_for_decode(self, decodable: list[Req]) -> ScheduleBatch:
        return prepare_for_decode(decodable, self.parts.req_to_token_pool, self.parts.allocator)

    def _has_memory_to_decode(self, decodable: list[Req]) -> bool:
        num_tokens = num_tokens_to_decode(decodable, self.config.page_size)
        return evict_for(num_tokens, self.parts.tree_cache, self.parts.allocator)

    def _retract_to_decode(self) -> list[Req]:
        """Retract requests until the others can decode. The last one stays: a chunked prompt is retracted
        before it, and alone it fits, because submission checked that. Returns the remaining requests."""
        candidates = retraction_order(self.running)
        while not self._has_memory_to_decode(decodable := self.pipeline.decodable(self.running)):
            if len(candidates) > 1:
                self._retract(candidates.pop())
            else:
                assert self.chunked_req is not None, "one request alone does not fit: submission checks this"
                self._retract(self.chunked_req)
        self.new_token_ratio.raise_after_retraction(self.running)
        return decodable

    # ---- run it ----

    def _launch(self, batch: ScheduleBatch) -> bool:
        """False when the model refuses it."""
        self.counts.num_steps += 1
        try:
            self.run_batch(batch)
        except BaseException as error:
            self._fail(batch, error)
            return False
        for req in batch.reqs[: batch.batch_size - batch.num_decode_reqs]:
            self.parts.tree_cache.cache_unfinished_req(req)
            if req is not self.chunked_req:
                self.running.append(req)
        return True

    def run_batch(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            assert self.speculator is not None
            self.speculator.run(batch)
        else:
            self.pipeline.launch(batch, self.chunked_req)

    def _sample_late(self, batch: InFlight) -> None:
        assert isinstance(batch, BatchInFlight)
        try:
            self.pipeline.sample(batch)
        except BaseException as error:
            self.pipeline.batches.remove(batch)
            self._fail(batch.batch, error)

    def process_batch_result(
        self,
        batch: BatchInFlight,
        forward_batch: ForwardBatch,
        logits_output: LogitsOutput,
        sample_output: SampleOutput,
    ) -> None:
        """Of the requests that are still in the batch. `forward_batch` has the length of its CPU lists."""
        assert sample_output.next_token_ids.shape == (forward_batch.batch_size,)
        next_token_ids = sample_output.next_token_ids.tolist()
        logprobs = to_token_logprobs(next_token_ids, sample_output.logprobs)
        batch.distribute_input_logprobs(logits_output.input_logprobs)
        for row, req in enumerate(batch.batch.reqs):
            if req is batch.chunked_req:
                continue  # its prompt is not complete: the sampled token means nothing
            if batch.rows.pop(req, None) is not None:
                self._append_tokens(req, next_token_ids[row : row + 1], logprobs[row : row + 1])
            if next_token_ids[row] < 0 and req in batch.prompts:
                self._discard(batch.prompts[req], batch)

    # --8<-- [start:discard-a-prompt]
    def _discard(self, prompt: CachedPrompt, batch: BatchInFlight) -> None:
        """Its logits were NaN: so may its KV be, and what others made of it who found it in the cache before
        that was known. They begin anew."""
        batches = (batch, *self.pipeline.batches)
        new = {req for each in batches for req in each.prompts if req in each.rows}
        for req in list(self.live.values()):
            if (req in new or req not in self.running) and prompt.may_be_held_by(req):
                batch.rows.pop(req, None)
                self.retract(req.rid)
        self.parts.tree_cache.discard(prompt.key, prompt.start)
        # --8<-- [end:discard-a-prompt]

    def _process_round(self, launched: RoundInFlight, outcome: Outcome) -> None:
        assert self.speculator is not None
        try:
            tokens = self.speculator.finish(launched, outcome)
        except BaseException as error:
            self._fail(launched.batch, error)
            return
        for req, token_ids, logprobs in tokens:
            self._append_tokens(req, token_ids, logprobs)

    def _append_tokens(self, req: Req, token_ids: list[int], logprobs: list[TokenLogprob]) -> None:
        num_new = append_tokens(req, token_ids, logprobs, self.parts.decode_text, self.parts.num_token_ids)
        if num_new > 0:
            req.kv_committed_len -= len(token_ids) - num_new  # what was accepted behind its end
        self.counts.add_output(req, num_new)
        if req.finished_reason is not None:
            self._finish(req, req.finished_reason, num_new)
        else:
            self.outputs.append(req.step_output(num_new))

    # ---- the end of a request, or of its turn ----

    def _finish(self, req: Req, reason: FinishReason, num_new_tokens: int = 0) -> None:
        """Release everything and report: the one place where a request ends."""
        req.finished_reason = reason
        self._release(req, is_insert=not isinstance(reason, FinishError))
        del self.live[req.rid]
        self.batch_is_full = False
        self.outputs.append(req.step_output(num_new_tokens))

    def _retract(self, req: Req) -> None:
        self._release(req, is_insert=False)
        req.reset_for_retraction()
        req.queue_start_time = self.parts.clock()
        self.waiting_queue.append(req)
        self.counts.num_retractions += 1
        self.batch_is_full = False

    def _release(self, req: Req, is_insert: bool) -> None:
        """Take the request out of wherever it is, and give its memory back."""
        if req is self.chunked_req:
            self.chunked_req = None
        elif req in self.running:
            self.running.remove(req)
        elif req in self.waiting_queue:
            self.waiting_queue.remove(req)
        self.pipeline.drop(req)
        if req.req_pool_idx is not None:
            self.parts.tree_cache.cache_finished_req(req, is_insert)
        if self.parts.drafter is not None:
            self.parts.drafter.forget(req)

    def _fail(self, batch: ScheduleBatch, error: BaseException) -> None:
        """The batch before is processed first: whom it ends has ended well, but nothing of this batch's KV
        may be found."""
        decoding = batch.reqs[batch.batch_size - batch.num_decode_reqs :]
        for req in decoding if batch.forward_mode is not ForwardMode.TARGET_VERIFY else []:
            if req.req_pool_idx is not None:
                req.kv_committed_len -= 1
        self._catch_up(num_left=0)
        for req in batch.reqs:
            if not req.finished:
                self._finish(req, FinishError(f"{type(error).__name__}: {error}"))
        if not isinstance(error, Exception):
            raise error  # an interrupt: the batch is lost, the engine is not

    # ---- looking in ----

    def flush_cache(self) -> bool:
        if self.live:
            return False
        self._catch_up(num_left=0)
        self.parts.tree_cache.reset()
        self.parts.allocator.clear()
        self.parts.req_to_token_pool.clear()
        return True

    def state(self) -> SchedulerState:
        return SchedulerState(list(self.waiting_queue), list(self.running), self.chunked_req)

    def stats(self) -> SchedulerStats:
        speculation = SpeculationStats()
        if self.speculator is not None:
            speculation = self.speculator.stats(self.counts.num_accepted_tokens)
        return self.counts.stats(self.state(), self.new_token_ratio.current, speculation)

    def _check_invariants(self) -> None:
        parts = self.parts
        check_invariants(self.state(), parts.allocator, parts.req_to_token_pool, parts.tree_cache)
