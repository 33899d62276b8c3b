"""Continuous batching as a plain loop: schedule, forward, process results."""

from __future__ import annotations

from diptych.reference.decoding import PlainDecoding
from diptych.reference.speculative.speculative_decoding import SpeculativeDecoding
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import RadixKey, SchedulerParts
from diptych.shared.sampling.logprobs import collect_input_logprobs
from diptych.shared.scheduling.base_scheduler import BaseScheduler
from diptych.shared.scheduling.stop_conditions import held_nan
from diptych.shared.types import BatchResult, Req, ScheduleBatch, StepOutput


class Scheduler(BaseScheduler):
    decoding: PlainDecoding | SpeculativeDecoding

    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        super().__init__(config, model_config, parts)
        self.decoding = (
            PlainDecoding(parts)
            if parts.drafter is None
            else SpeculativeDecoding(config, self.context_len, parts)
        )

    def _decode_blocks(self) -> None:
        from diptych.reference.modes.block_diffusion import DiffusionDecoding

        self.decoding = DiffusionDecoding(self.parts)  # plain requests go on as before

    # --8<-- [start:scheduler-step]
    def step(self) -> list[StepOutput]:
        self._finish_overdue()
        batch = self._schedule()
        if batch is not None:
            self.num_steps += 1
            try:
                result = self.run_batch(batch)
                with self.parts.timeline.span("process results"):
                    self.process_batch_result(batch, result)
            except BaseException as error:
                self._finish_with_error(batch.reqs, error)
        return self._take_outputs()

    # --8<-- [end:scheduler-step]

    def _get_batch_decode(self) -> ScheduleBatch | None:
        if not self.running:
            return None
        batch = self.decoding.prepare(self.running)
        if batch is None:
            return self._retract_to_decode()
        self.new_token_ratio.decay()
        return batch

    def run_batch(self, batch: ScheduleBatch) -> BatchResult:
        return self.decoding.run(batch, self.chunked_req)

    # --8<-- [start:process-batch-result]
    def process_batch_result(self, batch: ScheduleBatch, result: BatchResult) -> None:
        extending = batch.reqs[: batch.num_extend_reqs]
        if any(req.next_input_logprob is not None for req in extending):
            collect_input_logprobs(extending, result.forward_batch, result.logits_output.input_logprobs)
        for i, (req, token_ids, logprobs) in enumerate(zip(batch.reqs, result.token_ids, result.logprobs)):
            if req is self.chunked_req:  # its prompt is not complete, so the sampled token has no meaning
                self.parts.tree_cache.cache_unfinished_req(req)
                continue
            self._append_tokens(req, token_ids, logprobs)
            if not req.finished and i < len(extending):
                self.parts.tree_cache.cache_unfinished_req(req)
                self.running.append(req)
        # --8<-- [end:process-batch-result]
        for req, token_ids in zip(extending, result.token_ids):
            has_no_token = req.finished and token_ids and token_ids[0] < 0
            if has_no_token and held_nan(req, self.parts.num_token_ids):
                self._discard(req)

    # --8<-- [start:discard-a-prompt]
    def _discard(self, req: Req) -> None:
        """Discard the KV of a request whose logits were NaN. The KV of its earlier
        chunks, which are cached, may be NaN too."""
        key_ids = req.key_ids[: len(req.fill_ids)]
        key = RadixKey(key_ids, req.extra_key, self.parts.tree_cache.is_bigram)
        self.parts.tree_cache.discard(key, req.kv_matched_len)
        # --8<-- [end:discard-a-prompt]
