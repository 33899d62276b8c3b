"""Stage 03, continuous batching: complete the functions that raise NotImplementedError.

diptych course grade 03     # in the folder of `diptych course start`
diptych check --stage 03 my_scheduler.py

The contract is in shared/interfaces/scheduler.py. What you do not write is inherited from
reference/scheduler.py: the constructor and the admission of waiting requests. The page has a table of what
you call: `self.requests` is the `Lifecycle` of shared/scheduling/lifecycle.py, and `self.parts`
(`SchedulerParts`, in the contract) has the other components, such as `tree_cache`.
"""

from __future__ import annotations

from diptych.reference.scheduler import Scheduler
from diptych.shared.types import BatchResult, Req, ScheduleBatch, StepOutput


class MyScheduler(Scheduler):
    def step(self) -> list[StepOutput]:
        """One batch, from its choice to its results. Returns `requests.take_outputs()`.

        `with self._errors_end(None):` is around the choice of a batch, `with self._errors_end(batch):` around
        its run and its results. Before the choice `requests.finish_overdue()` ends requests over their time
        limit. `requests.num_steps` counts the batches. When `requests.live` is empty, set
        `new_token_ratio.current` to `new_token_ratio.initial`, as at the start."""
        raise NotImplementedError("TODO one request: the loop body of continuous batching")

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """A prefill batch if there is one, else a decode batch. With `enable_mixed_chunk`: both in one
        (`mix(prefill, decode)` of shared/scheduling/pages.py), where `decoding.prepare(running)` has room for
        the decode tokens."""
        raise NotImplementedError("TODO one request: which of the two comes first?")

    def _retract_to_decode(self) -> ScheduleBatch:
        """A decode batch, when slots are short. `decoding.prepare(running)` gives one, or None without
        memory; `requests.retract(req)` frees that of a request. `retraction_order` of
        shared/scheduling/pages.py sorts requests in the order in which to keep them. The first one always
        stays: a chunked request goes before it. A retraction shows that the reservations were too small
        (`new_token_ratio.raise_after_retraction(running)`)."""
        raise NotImplementedError("TODO shortage: as few requests as possible lose their memory")

    def process_batch_result(self, batch: ScheduleBatch, result: BatchResult) -> None:
        """result.tokens has the arguments of `requests.append_tokens` for each request of the batch, and
        result.token_ids their tokens alone. The first batch.num_extend_reqs requests come from a prefill: one
        of them may be `requests.chunked_req`, whose prompt goes on, and the others join `requests.running`,
        if they have not ended. `parts.tree_cache.cache_unfinished_req` shares the pages of those that go on.

        A request that ends with a token id below 0 had no token to choose. Then
        `held_nan(req, parts.num_token_ids)` (shared/scheduling/stop_conditions.py) is True if NaN was the
        reason: `_discard` its KV."""
        raise NotImplementedError("TODO one request: each request gets its tokens; what becomes of it then?")

    def _discard(self, req: Req) -> None:
        """The logits of a request that has ended were NaN. Its KV may be NaN from req.kv_matched_len on.
        `parts.tree_cache.discard(key, start)`; the key is a `RadixKey` (shared/interfaces/prefix_cache.py) of
        the first len(req.fill_ids) of `req.key_ids`, `req.extra_key`, and the cache's own `is_bigram`."""
        raise NotImplementedError("TODO failures: no other request may find this KV")
