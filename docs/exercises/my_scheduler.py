"""Stage 03, continuous batching: complete the functions that raise NotImplementedError.

cp docs/exercises/my_scheduler.py my_scheduler.py
diptych check --stage 03 my_scheduler.py

The contract is in shared/interfaces/scheduler.py. What you do not write is inherited from
reference/scheduler.py: the constructor and the admission of waiting requests. `self.requests`
(shared/scheduling/lifecycle.py) has the requests: the lists `waiting_queue` and `running`, the one
`chunked_req`, and `append_tokens`, `retract`, `finish_with_error`, `abandon` and `take_outputs`.
"""

from __future__ import annotations

from diptych.reference.scheduler import Scheduler
from diptych.shared.types import BatchResult, Req, ScheduleBatch, StepOutput


class MyScheduler(Scheduler):
    def step(self) -> list[StepOutput]:
        """One batch: end overdue requests (`requests.finish_overdue`), choose a batch
        (`get_next_batch_to_run`), count it (`requests.num_steps`), run it (`decoding.run(batch,
        requests.chunked_req)`), process its result, and return the pending outputs
        (`requests.take_outputs`). If no request is `live` then, `new_token_ratio.current` is `.initial`
        again. An exception while a batch is chosen is raised again after `requests.abandon(error)`. A later
        exception ends the requests of the batch (`requests.finish_with_error`)."""
        raise NotImplementedError("TODO one request: the loop body of continuous batching")

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """A prefill batch if there is one, else a decode batch. With `enable_mixed_chunk`: both in one
        (`mix(prefill, decode)` of shared/scheduling/pages.py), where `decoding.prepare(running)` has room for
        the decode tokens."""
        raise NotImplementedError("TODO one request: `get_new_batch_prefill`, else `get_batch_decode`")

    def _retract_to_decode(self) -> ScheduleBatch:
        """A decode batch when slots are short: `requests.retract` one request after the other until
        `decoding.prepare(running)` gives a batch. `retraction_order` of shared/scheduling/pages.py sorts
        them; the first one stays, and a chunked request goes before it. Then raise the ratio
        (`new_token_ratio.raise_after_retraction`)."""
        raise NotImplementedError("TODO shortage: retract until the others can decode")

    def process_batch_result(self, batch: ScheduleBatch, result: BatchResult) -> None:
        """Append the tokens of each request (`requests.append_tokens`). The first batch.num_extend_reqs
        requests are extending: their KV goes to the prefix cache (`cache_unfinished_req`), and they join
        `running`. The token of a chunked request whose prompt goes on is dropped. If an extending request
        ended with a token id below 0 and `held_nan`, `_discard` it at the end."""
        raise NotImplementedError(
            "TODO one request: `append_tokens` for each; then cache, and join `running`"
        )

    def _discard(self, req: Req) -> None:
        """The logits of an extending request were NaN, and so may its KV be, from req.kv_matched_len on."""
        raise NotImplementedError("TODO failures: `tree_cache.discard` of the tokens in fill_ids")
