"""Stage 09, overlap scheduling: complete the functions that raise NotImplementedError.

cp docs/exercises/my_overlap.py my_overlap.py
diptych check --stage 09 my_overlap.py

The contract is in shared/interfaces/scheduler.py. What you do not write is inherited from
optimized/scheduler.py: the constructor, and the choice of a batch. `Pipeline` in
optimized/overlap/in_flight.py holds the batches that were launched and not processed: `pipeline.batches`
(oldest first), `InFlight.rows`, `InFlight.results`. `PlainDecoding` in optimized/decoding.py launches a
batch (`run`) and reads its results (`finish`). `self.requests` (shared/scheduling/lifecycle.py) has the
requests, as in stage 03.
"""

from __future__ import annotations

from diptych.optimized.overlap.cached_prompt import CachedPrompt
from diptych.optimized.overlap.in_flight import InFlight
from diptych.optimized.scheduler import Scheduler
from diptych.shared.types import BatchResult, ScheduleBatch, StepOutput


class MyScheduler(Scheduler):
    def step(self) -> list[StepOutput]:
        """End overdue requests (`requests.finish_overdue`), choose a batch (`get_next_batch_to_run`) and
        launch it (`_launch`). Then process what is older (`_catch_up`) and return the pending outputs
        (`requests.take_outputs`).

        `decoding.num_ahead(running)` batches may be in flight when the next one is chosen: catch up to
        that many before, and once more after a launch. Without a launch, process all of them; also when no
        request is `live`: nothing may run then, and `new_token_ratio.current` is `.initial`
        again. If choosing a batch raises: wait for the device (`pipeline.streams.synchronize`), clear
        `pipeline.batches`, `requests.abandon(error)`, and raise it."""
        raise NotImplementedError("TODO one request: choose and launch a batch, then process the one before")

    def _launch(self, batch: ScheduleBatch) -> bool:
        """Count the step (`requests.num_steps`) and launch the batch (`decoding.run(batch,
        requests.chunked_req)`). The first batch.num_extend_reqs requests are extending: their prompts go
        to the prefix cache now (`cache_unfinished_req`), and they join `running`, except the one whose
        prompt goes on (`chunked_req`). False when the model raises: then `_fail`."""
        raise NotImplementedError("TODO one request: run the batch; cache its prompts without their results")

    def _catch_up(self, num_left: int) -> None:
        """Process batches, the oldest first, until at most `num_left` are in flight. One without `results`
        was not sampled: `_sample_late`. Else `results.wait()`, then remove it from `pipeline.batches` and
        call `process_batch_result` with `decoding.finish(batch, outputs)`; an exception there ends its
        requests (`requests.finish_with_error`). Last, if the oldest that is left has no results, sample
        it: its tokens depend on the batch that was just processed."""
        raise NotImplementedError("TODO one request: wait for the oldest batch and process its results")

    def _sample_late(self, batch: InFlight) -> None:
        """`pipeline.sample` a batch whose forward pass was launched without sampling. If it raises, the batch
        leaves the pipeline, and its requests end (`_fail`)."""
        raise NotImplementedError("TODO grammars: sample now that all earlier tokens are known")

    def _fail(self, batch: ScheduleBatch, error: BaseException) -> None:
        """The model refused a batch that is not in the pipeline. Wait for the device, and process the batch
        before (`_catch_up`): requests that it ends have ended well. But nothing of this batch's KV may be
        cached: each decoding request that still has a row has one token less in `kv_committed_len` (not in
        TARGET_VERIFY). Then `requests.finish_with_error`, unless all requests of the batch have finished and
        `error` is an Exception."""
        raise NotImplementedError("TODO failures: take the token back, process the batch before, then end")

    def get_batch_decode(self) -> ScheduleBatch | None:
        """A decode step of `_decodable()`. `decoding.prepare` returns None if slots are short."""
        decodable = self._decodable()
        if not decodable:
            return None
        batch = self.decoding.prepare(decodable)
        if batch is None:
            raise NotImplementedError("TODO shortage: a batch in flight may end requests; retract after that")
        self.new_token_ratio.decay()
        return batch

    def process_batch_result(self, batch: InFlight, result: BatchResult) -> None:
        """`result.token_ids` and `.logprobs` are of the requests in `batch.batch.reqs`; those without
        token ids are skipped. A request that is not in `batch.rows` has left: its tokens are dropped.
        Remove each row, then `requests.append_tokens`. If a first token id is below 0, the request is in
        `batch.prompts`, and `held_nan`: `_discard(prompt, batch)`."""
        raise NotImplementedError("TODO one request: append tokens of the requests that are still in `rows`")

    def _discard(self, prompt: CachedPrompt, launched: InFlight) -> None:
        """The logits of `prompt` were NaN, and its KV is in the cache. Requests that may have found it
        (`prompt.may_be_held_by`) and are waiting for their first token start again: remove them from
        `launched.rows` and retract them (`requests.retract_by_id`). They are `prompts` of `launched` or of a
        batch in flight, or not `running` yet. Then discard the prompt's own tokens from the prefix cache."""
        raise NotImplementedError("TODO failures: retract who may have found it, then `tree_cache.discard`")
