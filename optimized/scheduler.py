"""Continuous batching with overlap scheduling: batch N+1 is formed and launched before N's results are read.

Differs from reference: the GPU goes from batch to batch without waiting for the CPU, which forms the next
one and processes the last one meanwhile. A request decodes from a token that the CPU does not have yet
(optimized/overlap/future_map.py). If that token ends it, one token too many was computed: its row is
dropped, and its slot freed with the others; an end by length is known ahead. A prompt is cached when it is
launched: a request that finds it there runs behind it, and starts again if it comes out as NaN. Loses a
step's overlap when memory is short, and the sampler's where a grammar needs token N before N+1 is sampled.
Outputs come one step later.
"""

from __future__ import annotations

from typing import Any

from diptych.optimized.decoding import PlainDecoding
from diptych.optimized.overlap.cached_prompt import CachedPrompt
from diptych.optimized.overlap.in_flight import BatchInFlight, InFlight
from diptych.optimized.speculative.speculative_decoding import SpeculativeDecoding
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.scheduling.base_scheduler import BaseScheduler
from diptych.shared.scheduling.stop_conditions import held_nan
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.types import ForwardMode, Req, ScheduleBatch, StepOutput


class Scheduler(BaseScheduler):
    overlaps = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        super().__init__(config, model_config, parts)
        self.waiting_queue = WaitingQueue()
        self.decoding: PlainDecoding = (
            PlainDecoding(parts)
            if parts.drafter is None
            else SpeculativeDecoding(config, self.context_len, parts)
        )
        self.pipeline = self.decoding.pipeline

    # --8<-- [start:scheduler-step]
    def step(self) -> list[StepOutput]:
        self._finish_overdue()
        num_ahead = self.decoding.num_ahead(self.running)
        self._catch_up(num_left=num_ahead)
        batch = self._schedule()
        is_launched = batch is not None and self._launch(batch)
        self._catch_up(num_left=num_ahead if is_launched else 0)
        if not self.live:
            self._catch_up(num_left=0)  # rows of ended requests: without live requests nothing may run
        return self._take_outputs()

    # --8<-- [end:scheduler-step]

    def _catch_up(self, num_left: int) -> None:
        """Process the oldest batches until at most `num_left` are in flight. Between two steps there is one;
        an interrupt while waiting can leave two."""
        while len(self.pipeline) > num_left:
            oldest = self.pipeline.batches[0]
            if oldest.results is None:
                self._sample_late(oldest)
                continue
            with self.parts.timeline.span("wait for tokens"):
                result = oldest.results.wait()
            reqs = list(oldest.rows)
            try:
                self.pipeline.batches.popleft()
                with self.parts.timeline.span("process results"):
                    self.process_batch_result(oldest, result)
            except BaseException as error:
                self._finish_with_error(reqs, error)
        if self.pipeline and self.pipeline.batches[0].results is None:
            self._sample_late(self.pipeline.batches[0])

    def _decodable(self) -> list[Req]:
        return self.pipeline.decodable(self.running)

    def _get_batch_decode(self) -> ScheduleBatch | None:
        decodable = self._decodable()
        if not decodable:
            return None
        batch = self.decoding.prepare(decodable)
        if batch is not None:
            self.new_token_ratio.decay()
        elif not self.pipeline:  # otherwise it may end requests, so it is processed before any retraction
            batch = self._retract_to_decode()
        return batch

    # ---- run it ----

    def _launch(self, batch: ScheduleBatch) -> bool:
        """Launch a batch. False if the model refuses it."""
        self.num_steps += 1
        try:
            self.run_batch(batch)
        except BaseException as error:
            self._fail(batch, error)
            return False
        for req in batch.reqs[: batch.num_extend_reqs]:
            self.parts.tree_cache.cache_unfinished_req(req)
            if req is not self.chunked_req:
                self.running.append(req)
        return True

    def run_batch(self, batch: ScheduleBatch) -> None:
        self.decoding.run(batch, self.chunked_req)

    def _sample_late(self, batch: InFlight) -> None:
        assert isinstance(batch, BatchInFlight)
        try:
            self.pipeline.sample(batch)
        except BaseException as error:
            self.pipeline.batches.remove(batch)
            self._fail(batch.batch, error)

    # --8<-- [start:process-batch-result]
    def process_batch_result(self, batch: InFlight, result: Any) -> None:
        """Process the results of the requests that are still in the batch."""
        for req, token_ids, logprobs in self.decoding.finish(batch, result):
            if batch.rows.pop(req, None) is not None:
                self._append_tokens(req, token_ids, logprobs)
            if token_ids[0] < 0 and req in batch.prompts and held_nan(req, self.parts.num_token_ids):
                self._discard(batch.prompts[req], batch)

    # --8<-- [end:process-batch-result]

    # --8<-- [start:discard-a-prompt]
    def _discard(self, prompt: CachedPrompt, launched: InFlight) -> None:
        """Discard the KV of a request whose logits were NaN. Its KV may be NaN, and so
        may the KV that other requests computed from its cached prefix; they start
        again."""
        batches = (launched, *self.pipeline.batches)
        new = {req for each in batches for req in each.prompts if req in each.rows}
        for req in list(self.live.values()):
            if (req in new or req not in self.running) and prompt.may_be_held_by(req):
                launched.rows.pop(req, None)
                self.retract(req.rid)
        self.parts.tree_cache.discard(prompt.key, prompt.start)
        # --8<-- [end:discard-a-prompt]

    # ---- failures ----

    def _fail(self, batch: ScheduleBatch, error: BaseException) -> None:
        """Handle a batch that the model refused. The previous batch is processed first, and the requests that
        it ends have ended regularly. No KV of the failed batch may stay in the cache."""
        self.pipeline.streams.synchronize()  # launched work of the batch may still write to its slots
        decoding = batch.reqs[batch.num_extend_reqs :]
        for req in decoding if batch.forward_mode is not ForwardMode.TARGET_VERIFY else []:
            if req.req_pool_idx is not None:
                req.kv_committed_len -= 1
        self._catch_up(num_left=0)
        if not isinstance(error, Exception) or not all(req.finished for req in batch.reqs):
            self._finish_with_error(batch.reqs, error)

    def _abandon(self, error: BaseException) -> None:
        self.pipeline.streams.synchronize()
        self.pipeline.batches.clear()
        super()._abandon(error)

    def flush_cache(self) -> bool:
        if self.live:
            return False
        self._catch_up(num_left=0)
        return super().flush_cache()
