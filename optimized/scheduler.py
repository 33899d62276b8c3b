"""The main loop with overlap scheduling: batch N+1 is formed and launched before N's results are read.

Differs from reference: the GPU goes from batch to batch without waiting for the CPU, which forms the next
one and processes the last one meanwhile. A request decodes from a token that the CPU does not have yet
(optimized/overlap/future_map.py). If that token ends it, one token too many was computed: its row is
dropped, and its slot freed with the others; an end by length is known ahead. A prompt is cached when it is
launched: a request that finds it there runs behind it, and starts again if it comes out as NaN. Loses a
step's overlap when memory is short, and the sampler's where a grammar needs token N before N+1 is sampled.
Outputs come one step later.
"""

from __future__ import annotations

from diptych.optimized.decoding import STEPS_TOGETHER, TOKENS_TOGETHER, PlainDecoding, has_short_steps
from diptych.optimized.overlap.cached_prompt import CachedPrompt
from diptych.optimized.overlap.in_flight import BatchInFlight, InFlight
from diptych.optimized.schedule_batch import prepare_for_extend
from diptych.optimized.speculative.speculative_decoding import SpeculativeDecoding
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import (
    AddReqResult,
    PrefillAdder,
    PrefillBudget,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
)
from diptych.shared.interfaces import scheduler as interface
from diptych.shared.scheduling.admission import NewTokenRatio
from diptych.shared.scheduling.lifecycle import Lifecycle
from diptych.shared.scheduling.pages import mix, retraction_order
from diptych.shared.scheduling.stop_conditions import held_nan
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.types import BatchResult, ForwardMode, Req, ScheduleBatch, StepOutput


class Scheduler(interface.Scheduler):
    overlaps = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        self.config = config
        self.parts = parts
        self.decoding: PlainDecoding = (
            PlainDecoding(parts)
            if parts.drafter is None
            else SpeculativeDecoding(config, config.context_len or model_config.context_len, parts)
        )
        self.pipeline = self.decoding.pipeline
        self.requests = Lifecycle(config, model_config, parts, self.decoding, WaitingQueue())
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self.overlaps = not config.disable_overlap_schedule
        self.has_short_steps = has_short_steps(config, model_config, parts.allocator.device)

    def add_request(self, req: Req) -> None:
        self.requests.add(req)

    def add_computed(self, req: Req, first: StepOutput, draft_state: bytes = b"") -> None:
        self.requests.add_computed(req, first, draft_state)

    def abort(self, rid: str) -> bool:
        return self.requests.abort(rid)

    def retract(self, rid: str) -> bool:
        return self.requests.retract_by_id(rid)

    def has_work(self) -> bool:
        return bool(self.requests.live or self.requests.outputs)

    # --8<-- [start:scheduler-step]
    def step(self) -> list[StepOutput]:
        requests = self.requests
        requests.finish_overdue()
        num_ahead = self.decoding.num_ahead(requests.running) if self.overlaps else 0
        self._catch_up(num_left=num_ahead)
        batch = self._choose_batch()
        is_launched = batch is not None and self._launch(batch)
        may_wait = is_launched and not self._prefill_follows()
        self._catch_up(num_left=num_ahead if may_wait else 0)
        if not requests.live:
            self._catch_up(num_left=0)  # rows of ended requests: without live requests nothing may run
            self.new_token_ratio.current = self.new_token_ratio.initial
        return requests.take_outputs()

    # --8<-- [end:scheduler-step]

    def _choose_batch(self) -> ScheduleBatch | None:
        """The next batch. An exception ends all requests and is raised again."""
        try:
            with self.parts.timeline.span("schedule"):
                return self.get_next_batch_to_run()
        except BaseException as error:
            self.pipeline.streams.synchronize()
            self.pipeline.batches.clear()
            self.requests.abandon(error)
            raise

    def _launch(self, batch: ScheduleBatch) -> bool:
        """Launch a batch, and cache its prompts before their results are known. False: the model refuses
        it."""
        requests = self.requests
        requests.num_steps += batch.num_steps
        requests.num_overlapped += batch.num_steps - (not self.pipeline)
        try:
            self.decoding.run(batch, requests.chunked_req)
        except BaseException as error:
            self._fail(batch, error)
            return False
        for req in batch.reqs[: batch.num_extend_reqs]:
            self.parts.tree_cache.cache_unfinished_req(req)
            if req is not requests.chunked_req:
                requests.running.append(req)
        return True

    def _catch_up(self, num_left: int) -> None:
        """Process the oldest batches until at most `num_left` are in flight. Between two steps there is one;
        an interrupt while waiting can leave two."""
        timeline, batches = self.parts.timeline, self.pipeline.batches
        while len(batches) > num_left:
            oldest = batches[0]
            if oldest.results is None:
                self._sample_late(oldest)
                continue
            with timeline.span("wait for tokens"):
                outputs = oldest.results.wait()
            reqs = list(oldest.rows)
            try:
                batches.popleft()
                with timeline.span("process results"):
                    self.process_batch_result(oldest, self.decoding.finish(oldest, outputs))
            except BaseException as error:
                self.requests.finish_with_error(reqs, error)
        if batches and batches[0].results is None:
            self._sample_late(batches[0])

    def _sample_late(self, batch: InFlight) -> None:
        assert isinstance(batch, BatchInFlight)
        try:
            self.pipeline.sample(batch)
        except BaseException as error:
            self.pipeline.batches.remove(batch)
            self._fail(batch.batch, error)

    def _fail(self, batch: ScheduleBatch, error: BaseException) -> None:
        """Handle a batch that the model refused. The previous batch is processed first, and the requests that
        it ends have ended regularly. No KV of the failed batch may stay in the cache."""
        self.pipeline.streams.synchronize()  # launched work of the batch may still write to its slots
        decoding = batch.reqs[batch.num_extend_reqs :]
        for req in decoding if batch.forward_mode is not ForwardMode.TARGET_VERIFY else []:
            if req.req_pool_idx is not None:
                req.kv_committed_len -= batch.num_steps
        self._catch_up(num_left=0)
        if not isinstance(error, Exception) or not all(req.finished for req in batch.reqs):
            self.requests.finish_with_error(batch.reqs, error)

    def _prefill_follows(self) -> bool:
        """Whether first tokens are in flight that shall not wait for the launch of the next prefill."""
        requests = self.requests
        if not self.config.disable_prefill_overlap or not any(each.prompts for each in self.pipeline.batches):
            return False
        is_next = requests.waiting_queue and not requests.batch_is_full
        return bool(is_next or requests.chunked_req is not None)

    # ---- choose the batch ----

    # --8<-- [start:get-next-batch]
    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Prefill first: waiting costs latency, and a larger running batch is efficient."""
        prefill = self.get_new_batch_prefill()
        if prefill is None:
            return self.get_batch_decode()
        decodable = self._decodable() if self.config.enable_mixed_chunk else []
        decode = self.decoding.prepare(decodable) if decodable else None
        return prefill if decode is None else mix(prefill, decode)

    # --8<-- [end:get-next-batch]

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """The prompt that was computed in part, and the waiting requests that fit."""
        config, parts, requests = self.config, self.parts, self.requests
        if requests.chunked_req is None and (requests.batch_is_full or not requests.waiting_queue):
            return None
        decodable = self._decodable()
        budget = PrefillBudget(
            page_size=config.page_size,
            max_prefill_tokens=config.max_prefill_tokens,
            chunked_prefill_size=config.chunked_prefill_size,
            new_token_ratio=self.new_token_ratio.current,
            num_mixed_decode_tokens=len(decodable) if config.enable_mixed_chunk else 0,
            num_reserved_tokens=sum(each.num_reserved(decodable) for each in requests.features),
            in_batch_prefix_threshold=config.in_batch_prefix_deprioritize_threshold,
        )
        adder = parts.prefill_adder(budget, parts.tree_cache, parts.allocator, decodable)
        if requests.chunked_req is not None:
            requests.chunked_req = adder.add_chunked_req(requests.chunked_req)
        if requests.chunked_req is None and not requests.batch_is_full:
            self._admit_waiting(adder)
        new = adder.can_run_list
        if not new:
            return None
        requests.have_started(new)
        if adder.new_chunked_req is not None:
            requests.chunked_req = adder.new_chunked_req
        batch = prepare_for_extend(new, parts)
        for each in requests.features:
            each.have_joined(new, requests.running)
        return batch

    def _admit_waiting(self, adder: PrefillAdder) -> None:
        requests, features = self.requests, self.requests.features
        order, deprioritized = self.parts.policy.order(requests.waiting_queue, requests.running)
        for req in order:
            if req.rid in deprioritized and adder.can_run_list:
                break  # one step later it finds its prefix in the cache
            if not all(each.may_join(req, requests.running, adder.can_run_list) for each in features):
                break
            if len(requests.running) + len(adder.can_run_list) >= self.config.max_running_requests:
                result = AddReqResult.NO_TOKEN
            else:
                for each in features:
                    each.is_joining(req)
                result = adder.add_one_req(req)
            if result is AddReqResult.WAIT:
                continue
            if result is AddReqResult.NO_TOKEN and any(each.makes_room(req, adder) for each in features):
                result = adder.add_one_req(req)
            if result is not AddReqResult.CONTINUE:
                # After an addition it is worth another try: the next step's budget reserves for what was
                # added now only the expected output, not the longest.
                has_no_room = result is AddReqResult.NO_TOKEN and not adder.can_run_list
                requests.batch_is_full = has_no_room and bool(requests.running)
                break
            requests.waiting_queue.remove(req)
            if adder.new_chunked_req is not None:
                break

    def get_batch_decode(self) -> ScheduleBatch | None:
        """A decode step of all running requests, or several, after retractions if memory is short."""
        decodable = self._decodable()
        if not decodable:
            return None
        batch = self.decoding.prepare(decodable, self._most_steps(len(decodable)))
        if batch is None and not self.pipeline:
            return self._retract_to_decode()  # a batch in flight may end requests, so it is processed before
        if batch is not None:
            self.new_token_ratio.decay()
        return batch

    def _most_steps(self, num_reqs: int) -> int:
        """Decode steps of one launch. Without the flag as many as pay, and few for new
        requests."""
        if self.config.num_continuous_decode_steps is not None:
            return self.config.num_continuous_decode_steps
        if not self.has_short_steps or num_reqs > self.parts.model_runner.max_replayed_bs:
            return 1
        return min(STEPS_TOGETHER, max(TOKENS_TOGETHER // num_reqs, 1))

    def _decodable(self) -> list[Req]:
        """The running requests that may produce a token beyond the one in flight."""
        return self.pipeline.decodable(self.requests.running)

    def _retract_to_decode(self) -> ScheduleBatch:
        """Retract requests until the others can decode. The last one stays: a chunked prompt is retracted
        before it, and alone it fits, because submission checked that."""
        requests = self.requests
        candidates = retraction_order(requests.running)
        while (batch := self.decoding.prepare(self._decodable())) is None:
            if len(candidates) > 1:
                requests.retract(candidates.pop())
            else:
                assert requests.chunked_req is not None, (
                    "one request alone does not fit: submission checks this"
                )
                requests.retract(requests.chunked_req)
        self.new_token_ratio.raise_after_retraction(requests.running)
        return batch

    # ---- process its results ----

    # --8<-- [start:process-batch-result]
    def process_batch_result(self, batch: InFlight, result: BatchResult) -> None:
        requests, num_token_ids = self.requests, self.parts.num_token_ids
        for req, token_ids, tokens in zip(batch.batch.reqs, result.token_ids, result.tokens):
            if not token_ids:
                continue  # its prompt is not complete, or it has left a round
            if batch.rows.pop(req, None) is not None:
                requests.append_tokens(req, *tokens)
            if token_ids[0] < 0 and req in batch.prompts and held_nan(req, num_token_ids):
                self._discard(batch.prompts[req], batch)

    # --8<-- [end:process-batch-result]

    # --8<-- [start:discard-a-prompt]
    def _discard(self, prompt: CachedPrompt, launched: InFlight) -> None:
        """Discard the KV of a request whose logits were NaN. Its KV may be NaN, and so
        may the KV that other requests computed from its cached prefix; they start
        again."""
        requests, batches = self.requests, (launched, *self.pipeline.batches)
        new = {req for each in batches for req in each.prompts if req in each.rows}
        for req in list(requests.live.values()):
            if (req in new or req not in requests.running) and prompt.may_be_held_by(req):
                launched.rows.pop(req, None)
                requests.retract_by_id(req.rid)
        self.parts.tree_cache.discard(prompt.key, prompt.start)
        # --8<-- [end:discard-a-prompt]

    # ---- inspection ----

    def flush_cache(self) -> bool:
        if self.requests.live:
            return False
        self._catch_up(num_left=0)
        return self.requests.flush_cache()

    def forget_kv(self) -> list[StepOutput]:
        self._catch_up(num_left=0)
        return self.requests.forget_kv()

    def state(self) -> SchedulerState:
        return self.requests.state()

    def stats(self) -> SchedulerStats:
        return self.requests.stats(self.new_token_ratio.current)
