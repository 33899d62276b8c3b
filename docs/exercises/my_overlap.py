"""Stage 09, overlap scheduling: complete the functions that raise NotImplementedError.

diptych course grade 09     # in the folder of `diptych course start`
diptych check --stage 09 my_overlap.py

The contract is in shared/interfaces/scheduler.py. You write the loop; what you do not write is inherited from
optimized/scheduler.py, which uses
    self.requests     the requests: waiting, running, live (shared/scheduling/lifecycle.py, as in stage 03)
    self.pipeline     batches that are launched and not processed: `batches`, oldest first
                      (`Pipeline` and `InFlight` in optimized/overlap/in_flight.py)
    self.decoding     `run` launches a batch, `finish` reads its results (`PlainDecoding` in
                      optimized/decoding.py)
"""

from __future__ import annotations

from diptych.optimized.overlap.in_flight import InFlight
from diptych.optimized.scheduler import Scheduler
from diptych.shared.scheduling.stop_conditions import held_nan
from diptych.shared.types import BatchResult, ScheduleBatch, StepOutput


class MyScheduler(Scheduler):
    def step(self) -> list[StepOutput]:
        """One turn of the loop: end overdue requests (`requests.finish_overdue`), launch at most one batch
        (`_choose`, `_launch`), and return the outputs that are known (`requests.take_outputs`).

        When a batch is chosen, and after a launch, at most `_num_ahead` batches are in flight; it is asked
        once in a step, at the beginning. Nothing is in flight after a step that launches nothing, or when no
        request is `live`; then `new_token_ratio.current` is `.initial` again."""
        raise NotImplementedError("TODO one request: the order of choosing, launching and processing")

    def _launch(self, batch: ScheduleBatch) -> bool:
        """Count the step (`requests.num_steps`; `.num_overlapped` if a batch is in flight), and run the batch
        (`decoding.run`, which also gets `requests.chunked_req`). Its first `num_extend_reqs` requests are
        prompts: they enter the prefix cache (`cache_unfinished_req`), and join `running` unless their prompt
        goes on. If the model raises: `_fail(batch, error)`, and False."""
        raise NotImplementedError("TODO one request: what can be done before the results are known")

    def _catch_up(self, num_left: int) -> None:
        """Process batches until at most `num_left` are in flight. Each of them: `_results_of`, then
        `process_batch_result` of what `decoding.finish` makes of them. If that raises, the requests of
        the batch end with the error (`requests.finish_with_error`), and the batch is not in flight any more.
        At last `_sample_next`."""
        raise NotImplementedError("TODO one request: wait for a batch, and process it")

    def get_batch_decode(self) -> ScheduleBatch | None:
        """A decode step of all `_decodable()` requests, or None. `decoding.prepare` takes them and
        `config.num_continuous_decode_steps`, and gives None if slots are short; `_retract_to_decode` makes
        room. After a step without retraction `new_token_ratio` decays."""
        raise NotImplementedError("TODO one request: may requests be retracted now?")

    def process_batch_result(self, batch: InFlight, result: BatchResult) -> None:
        """Append the tokens of a batch (`requests.append_tokens`). `result.token_ids` and `.logprobs` are of
        the requests in `batch.batch.reqs`. `batch.rows` has those of them that still wait for this batch, and
        none after it is processed."""
        raise NotImplementedError("TODO one request: whose tokens are these?")
        # A prompt whose logits are NaN leaves the cache: for each request with tokens, as the last thing,
        #     if token_ids[0] < 0 and req in batch.prompts and held_nan(req, self.parts.num_token_ids):
        #         self._discard(batch.prompts[req], batch)

    # What follows is complete.

    def _num_ahead(self) -> int:
        """Batches that may be in flight when the next one is formed."""
        return self.decoding.num_ahead(self.requests.running) if self.overlaps else 0

    def _choose(self) -> ScheduleBatch | None:
        """`get_next_batch_to_run`. If it raises, nothing is in flight any more, and all requests end."""
        try:
            return self.get_next_batch_to_run()
        except BaseException as error:
            self.pipeline.streams.synchronize()
            self.pipeline.batches.clear()
            self.requests.abandon(error)
            raise

    def _results_of(self, batch: InFlight) -> object | None:
        """Wait for the results of a batch, which stays in flight. None: sampling failed, and it is gone."""
        if batch.results is None:
            self._sample_late(batch)
        return None if batch.results is None else batch.results.wait()

    def _sample_next(self) -> None:
        """Sample the oldest batch, if that waited for the batch before it (a grammar reads every token)."""
        batches = self.pipeline.batches
        if batches and batches[0].results is None:
            self._sample_late(batches[0])
