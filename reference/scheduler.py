"""Continuous batching as a plain loop: schedule, forward, process, in sequence."""

from __future__ import annotations

from reference.schedule_batch import make_forward_batch
from reference.speculative.speculator import Speculator
from shared.config import EngineConfig, ModelConfig
from shared.interfaces import (
    AddReqResult,
    PrefillAdder,
    RadixKey,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
)
from shared.interfaces import scheduler as interface
from shared.sampling.logprobs import collect_input_logprobs, to_token_logprobs
from shared.sampling.sampling_batch import make_sampling_batch_info
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
        self.waiting_queue = WaitingQueue()
        self.running: list[Req] = []
        self.chunked_req: Req | None = None
        self.live: dict[str, Req] = {}
        self.outputs: list[StepOutput] = []  # pending outputs for the next return of step()
        self.batch_is_full = False  # no memory for more requests until one leaves
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self.speculator = Speculator(config, self.context_len, parts) if parts.drafter is not None else None
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

    # --8<-- [start:scheduler-step]
    def step(self) -> list[StepOutput]:
        for req, reason in all_overdue(self.live.values(), self.config, self.parts.clock):
            self._finish(req, reason)
        with self.parts.timeline.span("schedule"):
            batch = self.get_next_batch_to_run()
        if batch is not None:
            self.counts.num_steps += 1
            try:
                result = self.run_batch(batch)
            except BaseException as error:
                self._fail(batch, error)
            else:
                with self.parts.timeline.span("process results"):
                    self.process_batch_result(batch, *result)
        if self.config.check_invariants:
            self._check_invariants()
        outputs, self.outputs = self.outputs, []
        return outputs

    # --8<-- [end:scheduler-step]

    # ---- which batch ----

    # --8<-- [start:get-next-batch]
    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Prefill comes first: a waiting request costs latency, and a larger running batch is efficient."""
        prefill = self._get_new_batch_prefill()
        if prefill is None:
            return self._get_batch_decode()
        if self.config.enable_mixed_chunk and self.running and self._has_memory_to_decode():
            return mix(prefill, self._prepare_for_decode())
        return prefill

    # --8<-- [end:get-next-batch]

    def _get_new_batch_prefill(self) -> ScheduleBatch | None:
        if self.chunked_req is None and (self.batch_is_full or not self.waiting_queue):
            return None
        adder = self.parts.prefill_adder(
            budget_of_step(
                self.config,
                self.new_token_ratio.current,
                len(self.running),
                self.speculator.num_reserved(self.running) if self.speculator else 0,
            ),
            self.parts.tree_cache,
            self.parts.allocator,
            self.running,
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
        if self.chunked_req in adder.can_run_list:
            self.chunked_req.num_pending_chunks += 1
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
        if not self.running:
            return None
        if self.speculator is not None and self.speculator.can_prepare(self.running):
            self.new_token_ratio.decay()
            return self.speculator.prepare(self.running)
        if self._has_memory_to_decode():
            self.new_token_ratio.decay()
        else:
            self._retract_to_decode()
        return self._prepare_for_decode()

    def _prepare_for_decode(self) -> ScheduleBatch:
        return prepare_for_decode(self.running, self.parts.req_to_token_pool, self.parts.allocator)

    def _has_memory_to_decode(self) -> bool:
        num_tokens = num_tokens_to_decode(self.running, self.config.page_size)
        return evict_for(num_tokens, self.parts.tree_cache, self.parts.allocator)

    def _retract_to_decode(self) -> None:
        """Retract requests until the others can decode. The last one stays: a chunked prompt is retracted
        before it, and alone it fits, because submission checked that."""
        candidates = retraction_order(self.running)
        while not self._has_memory_to_decode():
            if len(candidates) > 1:
                self._retract(candidates.pop())
            else:
                assert self.chunked_req is not None, "one request alone does not fit: submission checks this"
                self._retract(self.chunked_req)
        self.new_token_ratio.raise_after_retraction(self.running)

    # ---- run it ----

    # --8<-- [start:run-batch]
    def run_batch(self, batch: ScheduleBatch) -> tuple[ForwardBatch, LogitsOutput, SampleOutput]:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            assert self.speculator is not None
            return self.speculator.run(batch)
        num_token_ids = self.parts.num_token_ids
        with self.parts.timeline.span("prepare"):
            forward_batch = make_forward_batch(batch, num_token_ids, self.parts.allocator.device)
            info = make_sampling_batch_info(batch.reqs, num_token_ids, self.parts.allocator.device)
        with self.parts.timeline.forward(forward_batch):
            logits_output, sample_output = self.parts.model_runner.forward_and_sample(
                forward_batch, self.parts.sampler, info, num_token_ids
            )
        if self.speculator is not None:
            self.speculator.extend(batch.reqs, forward_batch, logits_output, sample_output)
        return forward_batch, logits_output, sample_output
        # --8<-- [end:run-batch]

    # --8<-- [start:process-batch-result]
    def process_batch_result(
        self,
        batch: ScheduleBatch,
        forward_batch: ForwardBatch,
        logits_output: LogitsOutput,
        sample_output: SampleOutput,
    ) -> None:
        with self.parts.timeline.span("wait for tokens"):
            next_token_ids = sample_output.next_token_ids.tolist()
        logprobs = to_token_logprobs(next_token_ids, sample_output.logprobs)
        num_extend = batch.batch_size - batch.num_decode_reqs
        collect_input_logprobs(batch.reqs[:num_extend], forward_batch, logits_output.input_logprobs)
        is_verify = batch.forward_mode is ForwardMode.TARGET_VERIFY  # a token behind each one that was kept
        end = 0
        for i, req in enumerate(batch.reqs):
            start, end = end, end + (forward_batch.extend_seq_lens_cpu[i] if is_verify else 1)
            if req.num_pending_chunks:
                req.num_pending_chunks -= 1  # its prompt is not complete: the sampled token means nothing
                self.parts.tree_cache.cache_unfinished_req(req)
                continue
            self._append_tokens(req, next_token_ids[start:end], logprobs[start:end])
            if not req.finished and i < num_extend:
                self.parts.tree_cache.cache_unfinished_req(req)
                self.running.append(req)
        # --8<-- [end:process-batch-result]
        for req, token_id in zip(batch.reqs[:num_extend], next_token_ids):
            if req.finished and token_id < 0:  # its logits were NaN: so may the KV be of its earlier chunks
                key = RadixKey(req.fill_ids, req.extra_key, self.parts.tree_cache.is_bigram)
                self.parts.tree_cache.discard(key, req.kv_matched_len)

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
        if req.req_pool_idx is not None:
            self.parts.tree_cache.cache_finished_req(req, is_insert)
        if self.parts.drafter is not None:
            self.parts.drafter.forget(req)

    def _fail(self, batch: ScheduleBatch, error: BaseException) -> None:
        for req in batch.reqs:
            self._finish(req, FinishError(f"{type(error).__name__}: {error}"))
        if not isinstance(error, Exception):
            raise error  # an interrupt: the batch is lost, the engine is not

    # ---- looking in ----

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
        speculation = SpeculationStats()
        if self.speculator is not None:
            speculation = self.speculator.stats(self.counts.num_accepted_tokens)
        return self.counts.stats(self.state(), self.new_token_ratio.current, speculation)

    def _check_invariants(self) -> None:
        parts = self.parts
        check_invariants(self.state(), parts.allocator, parts.req_to_token_pool, parts.tree_cache)
