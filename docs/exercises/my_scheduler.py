"""Stage 03, continuous batching: complete the functions that raise NotImplementedError.

cp docs/exercises/my_scheduler.py my_scheduler.py
diptych check --stage 03 my_scheduler.py

The contract is in shared/interfaces/scheduler.py. `BaseScheduler` in shared/scheduling/base_scheduler.py has
what you call: `_get_new_batch_prefill`, `_append_tokens`, `_retract_to_decode`, `_finish_with_error`.
"""

from __future__ import annotations

from diptych.reference.decoding import PlainDecoding
from diptych.reference.speculative.speculative_decoding import SpeculativeDecoding
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import RadixKey, SchedulerParts
from diptych.shared.sampling.logprobs import collect_input_logprobs
from diptych.shared.scheduling.base_scheduler import BaseScheduler
from diptych.shared.scheduling.pages import mix
from diptych.shared.types import BatchResult, Req, ScheduleBatch, StepOutput


class MyScheduler(BaseScheduler):
    def __init__(self, config: EngineConfig, model_config: ModelConfig, parts: SchedulerParts) -> None:
        super().__init__(config, model_config, parts)
        self.decoding = (
            PlainDecoding(parts)
            if parts.drafter is None
            else SpeculativeDecoding(config, self.context_len, parts)
        )

    def step(self) -> list[StepOutput]:
        """One batch: end overdue requests (`_finish_overdue`), choose a batch (`_schedule`), count it
        (`num_steps`), run it, process its result, and return the pending outputs (`_take_outputs`). An
        exception of the batch ends its requests (`_finish_with_error`)."""
        raise NotImplementedError("TODO one request: the loop body of continuous batching")

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """A prefill batch if there is one, else a decode batch. With `enable_mixed_chunk`: both in one
        (`mix(prefill, decode)`), where `decoding.prepare(running)` has room for the decode tokens."""
        raise NotImplementedError("TODO one request: `_get_new_batch_prefill`, else `_get_batch_decode`")

    def run_batch(self, batch: ScheduleBatch) -> BatchResult:
        return self.decoding.run(batch, self.chunked_req)

    def process_batch_result(self, batch: ScheduleBatch, result: BatchResult) -> None:
        """Append the tokens of each request. The first batch.num_extend_reqs requests are extending: their KV
        goes to the prefix cache (`cache_unfinished_req`), and they join `running`. The token of a chunked
        request whose prompt goes on is dropped."""
        extending = batch.reqs[: batch.num_extend_reqs]
        if any(req.next_input_logprob is not None for req in extending):
            collect_input_logprobs(extending, result.forward_batch, result.logits_output.input_logprobs)
        raise NotImplementedError(
            "TODO one request: `_append_tokens` for each; then cache, and join `running`"
        )

    def _get_batch_decode(self) -> ScheduleBatch | None:
        """A decode step of all running requests. `decoding.prepare` returns None if slots are short."""
        if not self.running:
            return None
        batch = self.decoding.prepare(self.running)
        if batch is None:
            raise NotImplementedError("TODO shortage: retract until the others can decode")
        self.new_token_ratio.decay()
        return batch

    def _discard(self, req: Req) -> None:
        """Called by `process_batch_result` for each extending request that ended with a token id below 0: its
        logits were NaN, and so may its KV be, from req.kv_matched_len on."""
        raise NotImplementedError("TODO failures: `tree_cache.discard` of the tokens in fill_ids")
